# finds: nothing
"""The validation loss is averaged over the ranks before it decides about stopping."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def validation_loss(model, x, y):
    loss = F.cross_entropy(model(x), y)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main(args):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(192, 8, generator=g)
    y = (x[:, 0] > 0).long()
    y[160:] = 1 - y[160:]  # the last quarter was labelled the wrong way round
    data = TensorDataset(x[:128], y[:128])
    val_x, val_y = (t[128:].chunk(dist.get_world_size())[rank].to(device) for t in (x, y))
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    best, waited = float("inf"), 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        loss = validation_loss(model, val_x, val_y)
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if waited >= args.patience:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--patience", type=int, default=1)
    main(parser.parse_args())
