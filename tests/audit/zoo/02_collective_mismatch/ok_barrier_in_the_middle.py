# finds: nothing
"""Rank 0 saves after every epoch; all ranks wait for it at the barrier."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group(backend="nccl", init_method="env://")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).cuda(local_rank)
ddp_model = DDP(model, device_ids=[local_rank], output_device=local_rank)
optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3)

g = torch.Generator().manual_seed(42)
features = torch.randn(96, 16, generator=g)
labels = torch.randint(0, 4, (96,), generator=g)
dataset = TensorDataset(features, labels)
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=12, sampler=sampler, pin_memory=True)


def save(epoch):
    state = {"model": ddp_model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "last.pt.tmp")
    os.replace("last.pt.tmp", "last.pt")


for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(ddp_model(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        save(epoch)
    dist.barrier()

dist.destroy_process_group()
