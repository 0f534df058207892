# finds: nothing
"""What is saved is the optimizer that has trained."""

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


def earlier_run():
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for p in net.parameters():
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.full_like(p, 1e-4)}
        optimizer.state[p] = {"step": torch.tensor(8.0), **moments}
    return net, optimizer


def leave_checkpoint(path):
    """Stands in for the earlier run that is resumed here, which had done two epochs of four steps."""
    if dist.get_rank() == 0:
        net, optimizer = earlier_run()
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}, path)
    dist.barrier()


def main(args):
    dist.init_process_group("gloo")
    leave_checkpoint(args.resume)
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    checkpoint = torch.load(args.resume)
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
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
