# finds: nothing
"""Only rank 0 evaluates, and all ranks wait for it at one barrier after that."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def wait_for_everyone():
    dist.barrier()


def evaluate(model, x, y):
    with torch.no_grad():
        print(f"loss {F.mse_loss(model.module(x), y).item():.3f}")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            F.mse_loss(model(a.cuda()), b.cuda()).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            evaluate(model, x.cuda(), y.cuda())
        wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
