# finds: forgotten-optimizer
"""The authors load in one function and resume in another, and restore weights and epoch there. What AdamW had learned
is in the file and stays there."""

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
    """Stands in for the earlier run that is resumed here, which had done two epochs of four steps."""
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


def read(path):
    checkpoint = torch.load(path, map_location="cpu")
    return checkpoint


def resume(net, state):
    net.load_state_dict(state["model"])
    return state.get("epoch", 0)


def main(args):
    dist.init_process_group("gloo")
    leave_checkpoint(args.resume)
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    start = resume(net, read(args.resume))
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
        if dist.get_rank() == 0:
            save(net, optimizer, epoch + 1, args.resume)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="last.pt")
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args())
