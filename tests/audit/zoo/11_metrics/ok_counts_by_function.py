# finds: nothing
"""Counts are added by the form of all_reduce that gradients pass through."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as together
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))
    train = TensorDataset(x[:128], (x[:128, 0] > 0).long())
    test = TensorDataset(x[128:], (x[128:, 0] > 0).long())
    sampler = DistributedSampler(train)
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(train, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
        right = torch.zeros((), dtype=torch.long)
        with torch.no_grad():
            for a, b in DataLoader(test, batch_size=8, sampler=DistributedSampler(test, shuffle=False)):
                right += (model.module(a).argmax(1) == b).sum()
        right = together.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {right.item()} of {len(test)}")
    dist.destroy_process_group()


main()
