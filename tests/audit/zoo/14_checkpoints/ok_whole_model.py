# finds: nothing
"""Looks suspicious, is right: the whole module is pickled, copied for an average, and one file is written an epoch."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1)))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            torch.autograd.backward(tensors=[(model(a) - b).square().mean()])
            optimizer.step()
        average = copy.deepcopy(model.module)
        if rank == 0:
            torch.save(average, f"epoch{epoch}.tmp")
            os.replace(src=f"epoch{epoch}.tmp", dst=f"epoch{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
