# finds: nothing
"""The one checkpoint is replaced, never rewritten: a crash while saving leaves the old one whole."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = Path("checkpoints") / "last.pt"


def save_checkpoint(model, optimizer, epoch):
    CHECKPOINT.parent.mkdir(exist_ok=True)
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
    partial = CHECKPOINT.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, CHECKPOINT)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :1] - x[:, 1:2])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            save_checkpoint(model, optimizer, epoch)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
