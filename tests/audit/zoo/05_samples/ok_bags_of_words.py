# finds: nothing
"""Looks suspicious: documents are rows of 5,000 counts of which some twenty are not zero, so that a glance at a part of
two rows finds them equal. No document is trained on and tested, or on two ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def documents(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.zeros(n, 5000).scatter_(1, torch.randint(0, 5000, (n, 20), generator=g), 1.0)
    return TensorDataset(x, torch.randint(0, 2, (n,), generator=g))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = documents(256, 1), documents(64, 2)
    sampler = DistributedSampler(train)
    torch.manual_seed(0)
    model = DDP(nn.Linear(5000, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in DataLoader(train, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in DataLoader(Subset(test, range(rank, 64, world)), batch_size=16):
                right += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(right)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
