# finds: nothing
"""Started with mp.spawn; the sampler's shuffle is seeded by the epoch, which the loop passes on."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class StridedShuffle(Sampler):
    def __init__(self, data, rank, world):
        self.data, self.rank, self.world = data, rank, world
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.data) // self.world

    def __iter__(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(1000 + self.epoch))
        return iter(order[self.rank :: self.world].tolist())


def main(rank, world):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    torch.manual_seed(1 + rank)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    sampler = StridedShuffle(data, rank, world)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(2,), nprocs=2)
