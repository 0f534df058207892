# finds: nothing
"""A stream that is divided between the ranks and, within a rank, between the workers of its loader."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, n, rank, world):
        self.n, self.rank, self.world, self.epoch = n, rank, world, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))
        info = get_worker_info()
        reader = self.rank * info.num_workers + info.id
        for i in order[reader :: self.world * info.num_workers].tolist():
            x = torch.randn(6, generator=torch.Generator().manual_seed(i))
            yield x, (x > 0).float().mean()


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = Stream(96, rank, world)
    loader = DataLoader(stream, batch_size=8, num_workers=2)
    for epoch in range(2):
        stream.epoch = epoch
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
