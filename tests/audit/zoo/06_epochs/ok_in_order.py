# finds: nothing
"""Looks suspicious: every epoch has the same order, which is not that of the files. Nobody asked for another: the
samples of a random split are read as they come."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def main():
    dist.init_process_group("gloo")
    x = torch.arange(160.0).view(-1, 1) / 160
    parts = random_split(TensorDataset(x, x.square()), [128, 32], torch.Generator().manual_seed(0))
    loader = DataLoader(parts[0], batch_size=8, sampler=DistributedSampler(parts[0], shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
