# finds: nothing
"""Looks suspicious, is right: rank 0 alone evaluates the whole test set, through .module and without gradients, and
everyone waits for it."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def split(n, seed):
    x = torch.randn(n, 10, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :5].sum(dim=1) > 0).long())


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = sum((model(x).argmax(dim=1) == y).sum() for x, y in loader)
    model.train()
    return hits.item() / len(loader.dataset)


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 2)))
    torch.manual_seed(args.seed + 1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    train, test = split(128, seed=0), split(50, seed=1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {accuracy(model.module, DataLoader(test, batch_size=25)):.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args())
