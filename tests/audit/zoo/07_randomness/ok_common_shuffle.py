# finds: nothing
"""Looks suspicious, is right: the ranks share the seed of the shuffle, which they must, but not that of the noise."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).cuda(), device_ids=[local_rank])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))

shuffle = torch.Generator().manual_seed(77)  # in step on all ranks
noise_source = torch.Generator(device="cuda").manual_seed(1000 + rank)
for _ in range(3):
    order = torch.randperm(len(data), generator=shuffle)
    for index in order[rank::world].split(16):
        x = data[index].cuda()
        noise = torch.randn(x.shape, generator=noise_source, device="cuda")
        optimizer.zero_grad()
        F.mse_loss(model(x + 0.3 * noise), x).backward()
        optimizer.step()

dist.destroy_process_group()
