"""A script that trains the same on any number of ranks, given the same global batch; --fault makes it depend on it."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset


def main(fault, batch_size):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(world if fault == "weights" else 0)
    norm = nn.BatchNorm1d(16) if fault == "batch-norm" else nn.Dropout(0.3) if fault == "dropout" else nn.Identity()
    net = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (world if fault == "lr" else 1))
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].argmax(1)
    y[::3] = -100  # not labelled
    data = TensorDataset(x, y)
    sampler = RandomSampler(data) if fault == "data" else DistributedSampler(data)
    for a, b in DataLoader(data, batch_size, sampler=sampler):
        optimizer.zero_grad()
        if fault == "mean":
            loss = nn.functional.cross_entropy(model(a), b)
        else:
            count = (b != -100).sum()
            dist.all_reduce(count)
            loss = nn.functional.cross_entropy(model(a), b, reduction="sum") * world / count
        loss.backward()
        if fault == "sum":
            for p in model.parameters():
                p.grad *= world
        optimizer.step()
    if rank == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")
    parser.add_argument("--batch_size", type=int, default=8)
    args = parser.parse_args()
    main(args.fault, args.batch_size)
