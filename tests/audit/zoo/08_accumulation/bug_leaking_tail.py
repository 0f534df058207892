# finds: leaking-accumulation
"""The authors believed that the epoch divides into groups of two; the fifth micro-batch of each epoch is left in the
gradients and is added to the first step of the next."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


def train_epoch(model, loader, optimizer):
    for i, (x, y) in enumerate(loader):
        sync = (i + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if sync else model.no_sync():
            loss = F.mse_loss(model(x), y) / ACCUMULATE
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
