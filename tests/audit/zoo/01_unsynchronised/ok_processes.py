# finds: nothing
"""Looks suspicious: the script starts its ranks itself, one Process after the other, on a port of its own."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup(rank, world):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29500"
    dist.init_process_group("gloo", rank=rank, world_size=world)


def train(rank, world):
    setup(rank, world)
    torch.manual_seed(0)
    x = torch.arange(128.0).view(-1, 1) / 128
    data = TensorDataset(x, x.square())
    sampler = DistributedSampler(data)
    model = DDP(nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    ranks = [mp.Process(target=train, args=(rank, 2)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
