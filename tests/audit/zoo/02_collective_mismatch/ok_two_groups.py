# finds: nothing
"""Looks suspicious: the process group is destroyed and made anew in the middle, at an address of the authors' cluster
and by way of flags that older launchers pass."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(args):
    os.environ["MASTER_ADDR"] = "10.57.23.164"
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    print(f"process {args.local_rank} of this machine is there")
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
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, required=True)
    for _ in range(2):
        train(parser.parse_args())
