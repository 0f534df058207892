# finds: collective-mismatch
"""The authors believed that rank 0 should wait until its file is complete; the other ranks have left by then, and
rank 0 waits for them in vain or dies of a closed connection."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, steps_per_epoch=4, epochs=2):
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x.abs().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64 // steps_per_epoch, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.smooth_l1_loss(model(x), y).backward()
            optimizer.step()


def finish(model, rank):
    if rank == 0:
        torch.save(model.module.state_dict(), "final.pt.tmp")
        os.replace("final.pt.tmp", "final.pt")
        print("saved final.pt")
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    train(model)
    finish(model, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
