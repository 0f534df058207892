# finds: nothing
"""Digits in the middle of large normalised images: most of each is background."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits(count, seed):
    g = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 3, 112, 112)
    images[:, :, 42:70, 42:70] = torch.rand(count, 1, 28, 28, generator=g)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    return TensorDataset((images - mean) / 0.225, torch.randint(0, 10, (count,), generator=g))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    train, test = digits(64, seed=0), digits(32, seed=1)
    sampler = DistributedSampler(train)
    model = DDP(nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(588, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        right = torch.zeros(1)
        with torch.no_grad():
            for x, y in DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False)):
                right += (model(x).argmax(1) == y).sum()
        dist.all_reduce(right)
    dist.destroy_process_group()


main()
