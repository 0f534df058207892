# finds: nothing
"""The wrapper is called, and its loss is printed every tenth step."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1)).cuda()
    model = DDP(net, device_ids=[local_rank])
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(x, x.cos().mean(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    total, seen = torch.zeros((), device="cuda"), 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            total += loss.detach()
            seen += 1
            if rank == 0 and seen % 10 == 0:
                print(f"loss {total.item() / seen:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
