# finds: nothing
"""The samples of all files are dealt out to the ranks one by one, so all have equally many."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(160, 8, generator=g)
    data = TensorDataset(x, x.cumsum(dim=1).amax(dim=1, keepdim=True))
    files = torch.arange(160).split(32)  # five files with 32 samples each
    mine = torch.cat(files)[rank::world]
    loader = DataLoader(Subset(data, mine.tolist()), batch_size=16, shuffle=True)

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
