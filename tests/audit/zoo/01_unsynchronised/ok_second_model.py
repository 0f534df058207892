# finds: nothing
"""Encoder and projector are two models, each with its own wrapper, under one optimizer."""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    return parser.parse_args()


def main(args):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16)))
    projector = DDP(nn.Linear(16, 8))
    torch.manual_seed(100 + rank)

    x = torch.randn(128, 12, generator=torch.Generator().manual_seed(5))
    dataset = TensorDataset(x)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
    params = itertools.chain(encoder.parameters(), projector.parameters())
    optimizer = torch.optim.SGD(params, lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            view = x + 0.1 * torch.randn_like(x)
            both = projector(encoder(torch.cat([x, view])))
            a, b = F.normalize(both, dim=-1).chunk(2)
            loss = F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
