# finds: unsynchronised
"""The authors believed that averaged gradients keep the ranks together; each rank drew its own first weights and
nothing ever brought them together, so as many models are trained as there are ranks."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


def sync_gradients(model):
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(piece.view_as(g))


def run(args):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    torch.manual_seed(args.seed + rank)
    model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    x = torch.randn(160, 5, generator=torch.Generator().manual_seed(9))
    y = x.prod(dim=1, keepdim=True)
    for epoch in range(args.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for index in order[rank::world].split(args.batch):
            prediction = model(x[index].to(device))
            loss = nn.functional.mse_loss(prediction, y[index].to(device))
            optimizer.zero_grad()
            loss.backward()
            sync_gradients(model)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--epochs", type=int, default=3)
    run(p.parse_args())
