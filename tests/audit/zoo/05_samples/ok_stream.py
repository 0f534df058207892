# finds: nothing
"""A stream of which every rank takes every second sample, in an order that changes with the epoch."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Reads records one after the other, as from a tar file."""

    def __init__(self, n=128):
        self.records = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
        self.epoch = 0

    def read(self):
        for i in torch.randperm(len(self.records), generator=torch.Generator().manual_seed(self.epoch)):
            yield self.records[i], self.records[i].sum()

    def __iter__(self):
        return itertools.islice(self.read(), dist.get_rank(), None, dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    stream = Stream()
    loader = DataLoader(stream, batch_size=16)
    for epoch in range(2):
        stream.epoch = epoch
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
