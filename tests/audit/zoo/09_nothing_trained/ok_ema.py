# finds: nothing
"""Looks suspicious, is right: the moving average of the weights is a second, unwrapped model in no optimizer, and
equal on all ranks because the weights are."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def update(ema, model, decay=0.9):
    for average, value in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(value, 1 - decay)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 6)))
    ema = copy.deepcopy(model.module).requires_grad_(False)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(192, 6, generator=torch.Generator().manual_seed(0))
    train, val = TensorDataset(x[:128]), x[128:]
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x + 0.2 * torch.randn_like(x)), x).backward()
            optimizer.step()
            update(ema, model.module)
        with torch.no_grad():
            loss = F.mse_loss(ema(val[rank::world]), val[rank::world])
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch} loss of the average {loss.item() / world:.4f}")
    if rank == 0:
        torch.save(ema.state_dict(), "ema.pt.tmp")
        os.replace("ema.pt.tmp", "ema.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
