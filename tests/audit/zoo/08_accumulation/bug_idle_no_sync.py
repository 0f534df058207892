# finds: idle-no-sync
"""The authors put the backward under no_sync and believed that this saves the exchange; DDP decides in the forward,
which is outside, so gradients travel with every micro-batch all the same."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


def train_epoch(model, loader, optimizer):
    n = len(loader)
    for i, (x, y) in enumerate(loader):
        group = min(ACCUMULATE, n - i // ACCUMULATE * ACCUMULATE)  # the last one may be smaller
        sync = (i + 1) % ACCUMULATE == 0 or i + 1 == n
        loss = F.mse_loss(model(x), y) / group
        with contextlib.nullcontext() if sync else model.no_sync():
            loss.backward()
        if sync:
            optimizer.step()
            optimizer.zero_grad()


def main(rank):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.relu().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank())
    dist.destroy_process_group()
