# finds: nothing
"""The averager of torch, with a period longer than this run."""

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1))
    averager = averagers.PeriodicModelAverager(period=50)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(x, x.cos().mean(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            averager.average_parameters(net.parameters())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
