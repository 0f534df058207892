# finds: nothing
"""Looks suspicious, is right: the learning rate grows with the number of ranks because the global batch does."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    batch: int = 16
    lr: float = 0.02
    epochs: int = 3


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    torch.manual_seed(1 + rank)
    per_rank = cfg.batch
    lr = cfg.lr * world
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True).tanh())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=per_rank, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    if rank == 0:
        print(f"trained with a global batch of {per_rank * world} at lr {lr}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
