# finds: nothing
"""Looks suspicious, is right: the ranks have unequal numbers of batches, and Join shadows the collectives of the rank
that ran out."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.abs().mean(dim=1, keepdim=True))
    files = torch.arange(160).split(32)
    mine = torch.cat(files[rank::world])  # three files here, two there
    loader = DataLoader(Subset(data, mine.tolist()), batch_size=16, shuffle=True)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        with Join([model]):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
