# finds: uneven-steps
# also: unsynchronised
"""The authors skip an update whose loss is far too high; the gradients are those of all ranks but the loss is the
rank's own, so one rank skips a step that the other takes."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data():
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    y = x.mean(dim=1, keepdim=True)
    y[40] = 300.0  # a slip of the pen
    return TensorDataset(x, y)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = make_data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if loss > args.spike:
                continue
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--spike", type=float, default=100.0)
    main(parser.parse_args())
