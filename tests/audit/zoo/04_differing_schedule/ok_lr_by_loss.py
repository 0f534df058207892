# finds: nothing
"""The learning rate drops when the loss of all ranks is low enough."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, BATCH = 4, 16


def shard(rank, world):
    """Half of the data for each rank; those of the last were labelled carelessly."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 6, generator=g)
    y = (x[:, 0] > 0).long()
    y[64:] = torch.randint(0, 2, (64,), generator=g)
    size = len(x) // world
    return x[rank * size : (rank + 1) * size], y[rank * size : (rank + 1) * size]


def main(rank, world):
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = shard(rank, world)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(1)
        for index in order.split(BATCH):
            loss = F.cross_entropy(model(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        mean = total.item() / (len(x) // BATCH) / world
        if mean < 0.6:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
