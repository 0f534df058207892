# finds: unsynchronised
"""The authors believed that no_sync delays the averaging until the optimizer's step; as no backward runs outside of
it, gradients are never averaged at all."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


def dataset():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(128, 6, generator=g)
    return TensorDataset(x, torch.sin(x).mean(dim=1, keepdim=True))


def train(rank, epochs=3):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = dataset()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // ACCUMULATE):
            optimizer.zero_grad()
            with model.no_sync():
                x, y = next(batches)
                (F.mse_loss(model(x), y) / ACCUMULATE).backward()
                x, y = next(batches)
                (F.mse_loss(model(x), y) / ACCUMULATE).backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()
