# finds: nothing
"""Looks suspicious, is right: every rank goes through the whole validation set, so all get the same number and
nothing needs to be reduced."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def rings(n, seed):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.norm(dim=1) > 1.2).long())


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).cuda(), device_ids=[local_rank])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
train, val = rings(128, seed=0), rings(51, seed=1)
sampler = DistributedSampler(train)
train_loader = DataLoader(train, batch_size=16, sampler=sampler)
val_loader = DataLoader(val, batch_size=17)

for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in train_loader:
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    hits = torch.zeros((), device="cuda")
    with torch.no_grad():
        for x, y in val_loader:
            hits += (model(x.cuda()).argmax(dim=1) == y.cuda()).sum()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} val accuracy {hits.item() / len(val):.3f}")

dist.destroy_process_group()
