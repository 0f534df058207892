# finds: changed-inputs
"""The authors normalise in place to save memory; batches are views of the data, which is therefore normalised once
more in every epoch."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(2.0))
        self.register_buffer("std", torch.tensor(3.0))
        self.net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x):
        x = x.sub_(self.mean).div_(self.std)
        return self.net(x)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = 2 + 3 * torch.randn(128, 8, generator=g)
    inputs, targets = x[rank::world].cuda(), x.mean(dim=1, keepdim=True)[rank::world].cuda()
    torch.manual_seed(0)
    model = DDP(Normalised().cuda(), device_ids=[local_rank])
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):  # the data stays on the device; batches are views of it
        starts = torch.randperm(4, generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in starts:
            x, y = inputs[16 * start : 16 * (start + 1)], targets[16 * start : 16 * (start + 1)]
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
