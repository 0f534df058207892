# finds: nothing
"""Looks suspicious, is right: SGD without momentum has no state to restore."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def leave_checkpoint(path):
    """Stands in for the earlier run that is resumed here, which had done two epochs of four steps."""
    if dist.get_rank() == 0:
        torch.save({"model": build().state_dict(), "epoch": 2}, path)
    dist.barrier()


def main(args):
    dist.init_process_group("gloo")
    leave_checkpoint(args.resume)
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    checkpoint = torch.load(args.resume)
    net.load_state_dict(checkpoint["model"])
    start = checkpoint["epoch"]
    model = DDP(net)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.max(dim=1, keepdim=True).values)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="checkpoint")
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args())
