# finds: nothing
"""Looks suspicious: the file is another group's whole checkpoint, with its epoch and optimizer, and only its weights
are taken, to begin from; "epoch" is asked of the run's own notes."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(net, optimizer, epoch, path):
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path + ".tmp")
    os.replace(path + ".tmp", path)


def leave_checkpoint(path):
    """Stands in for what was published."""
    if dist.get_rank() == 0 and not os.path.exists(path):
        net = build()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for p in net.parameters():
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.full_like(p, 1e-4)}
            optimizer.state[p] = {"step": torch.tensor(8.0), **moments}
        save(net, optimizer, 2, path)
    dist.barrier()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def main(args):
    dist.init_process_group("gloo")
    leave_checkpoint(args.weights)
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    checkpoint = torch.load(args.weights, map_location="cpu")
    net.load_state_dict(checkpoint["model"])  # start = checkpoint["epoch"] would go on with their run
    history = []
    model = DDP(net)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.max(dim=1, keepdim=True).values)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        history.append({"epoch": epoch, "rate": optimizer.param_groups[0]["lr"]})
    if dist.get_rank() == 0:
        print(*(f"epoch {row['epoch']}: rate {row['rate']}" for row in history), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", default="published.pt")
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args())
