# finds: nothing
"""The average is updated after each step of the optimizer."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4


@torch.no_grad()
def update(ema, net, decay=0.9):
    for average, p in zip(ema.parameters(), net.parameters()):
        average.data.mul_(decay).add_(p.data, alpha=1 - decay)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1))
    model = DDP(net)
    ema = copy.deepcopy(net).requires_grad_(False)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(x, x.cos().mean(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % ACCUMULATE == 0
            model.require_backward_grad_sync = last
            (F.mse_loss(model(x), y) / ACCUMULATE).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                update(ema, net)
    if rank == 0:
        torch.save(ema.state_dict(), "ema.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
