# finds: nothing
"""Looks suspicious: every rank goes through all of its data set without a sampler. It is a part that it cut off for
itself, whose samples it numbers from 0."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Partition(Dataset):
    def __init__(self, x, places):
        self.x, self.places = x, places

    def __len__(self):
        return len(self.places)

    def __getitem__(self, i):
        x = self.x[self.places[i]]
        return x, x.sum()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(1234)
    x = torch.randn(128, 8, generator=g)
    order = torch.randperm(len(x), generator=g).tolist()
    loader = DataLoader(Partition(x, order[rank::world]), batch_size=8, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
