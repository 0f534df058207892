# finds: nothing
"""Looks suspicious, is right: each step uses one of two branches, so the search for unused parameters is needed, and
over the run both branches train."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.branches = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])

    def forward(self, x, which):
        return self.branches[which](torch.tanh(self.stem(x)))


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = DDP(Branches().to(device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.stack([x.sum(dim=1), x.prod(dim=1)], dim=1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            which = step % 2
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device), which).squeeze(1), y[:, which].to(device)).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
