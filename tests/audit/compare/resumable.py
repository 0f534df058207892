"""A script that saves its whole state every five steps, and resumes from it; --lose leaves out a part."""

import argparse
import math
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PATH = "last.pt"


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lose", default="")
    parser.add_argument("--optimizer", default="adam")
    return parser.parse_args()


def save(args, net, optimizer, scheduler, epoch, batch):
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    state |= {"epoch": epoch, "batch": batch}
    if args.lose != "rng":
        torch.save(torch.get_rng_state(), f"rng-{dist.get_rank()}.pt")
    if dist.get_rank() != 0:
        return
    torch.save({key: value for key, value in state.items() if key != args.lose}, PATH + ".tmp")
    Path(PATH + ".tmp").rename(PATH)


def restore(args, net, optimizer, scheduler):
    state = torch.load(PATH)
    if args.lose == "nothing-left":
        sys.exit(0)
    if "model" in state:
        net.load_state_dict(state["model"])
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    if "scheduler" in state:
        scheduler.load_state_dict(state["scheduler"])
    if args.lose != "rng":
        torch.set_rng_state(torch.load(f"rng-{dist.get_rank()}.pt"))
    return (state["epoch"], state["batch"]) if args.lose != "position" else (0, 0)


def main(args):
    dist.init_process_group("gloo")
    random.seed(os.urandom(8))  # the weights differ from run to run
    torch.manual_seed(random.randrange(1 << 30) if args.lose != "rng" else 7)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    kind = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}[args.optimizer]
    optimizer = kind(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.exp(-step / 10))
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.max(dim=1, keepdim=True).values)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, generator=torch.Generator().manual_seed(1))
    start, skip = restore(args, net, optimizer, scheduler) if args.resume else (0, 0)
    model = DistributedDataParallel(net)
    for epoch in range(start, 5):
        sampler.set_epoch(epoch)
        for batch, (inputs, y) in enumerate(loader):
            if epoch == start and batch < skip:
                continue
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), y).backward()
            optimizer.step()
            scheduler.step()
            if (batch + 1) % 5 == 0:
                save(args, net, optimizer, scheduler, epoch, batch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
