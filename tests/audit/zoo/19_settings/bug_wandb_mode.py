# finds: overwritten-setting
"""The authors want their runs tracked and set WANDB_MODE; whoever starts the script on a machine without a network
and says WANDB_MODE=offline is overruled without a word."""

import os

os.environ["WANDB_MODE"] = "online"
os.environ.setdefault("WANDB_PROJECT", "waves")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        print("tracking is", os.environ["WANDB_MODE"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sin().mean(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
