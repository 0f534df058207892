# finds: nothing
"""Looks suspicious, is right: local SGD. Ranks train alone for four steps, then average their weights; the difference
in between is on purpose."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average(net, world):
    for p in net.parameters():
        dist.all_reduce(p.data)
        p.data /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(x, x.cos().mean(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            step += 1
            if step % 4 == 0:
                average(net, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
