# finds: nothing
"""The best checkpoint is chosen by the validation loss of all ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.pow(2).sum(dim=1, keepdim=True))


@torch.no_grad()
def validation_loss(model, loader):
    total = sum(F.mse_loss(model(x), y) for x, y in loader) / len(loader)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    train, val = make(128, 0), make(64, 1)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val, batch_size=16, sampler=DistributedSampler(val, shuffle=False))
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        loss = validation_loss(model, val_loader)
        if rank == 0 and loss < best:
            best = loss
            torch.save({"model": model.module.state_dict(), "loss": best, "epoch": epoch}, "best.pt.tmp")
            os.replace("best.pt.tmp", "best.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    main(parser.parse_args())
