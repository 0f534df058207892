# finds: repeated-samples
# also: unseen-samples
"""The authors believed that their sampler deals out the shuffled set; it cuts off the same first part on every rank,
so both train on the same half and the other half is left out of the epoch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ShardedSampler(Sampler):
    def __init__(self, size, rank, world, seed=0):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return self.size // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=g).tolist()
        n = len(self)
        return iter(order[:n])


def main(rank, world):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 8, generator=g)
    data = TensorDataset(x, x @ torch.randn(8, 2, generator=g))
    sampler = ShardedSampler(len(data), rank, world)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 2))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.epoch = epoch
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
