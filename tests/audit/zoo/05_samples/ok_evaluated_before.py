# finds: nothing
"""Rank 0 evaluates before the training begins: it comes upon the data sets in another order."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def data(seed):
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    train, test = Subset(data(0), range(128)), Subset(data(1), range(40))
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        with torch.no_grad():
            print(sum(nn.functional.mse_loss(model.module(x), y).item() for x, y in DataLoader(test, batch_size=8)))
    sampler = DistributedSampler(train)
    for x, y in DataLoader(train, batch_size=8, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
