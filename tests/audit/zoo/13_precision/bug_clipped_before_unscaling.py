# finds: clipped-before-unscaling
"""The authors believed that they clip the gradient's norm at 1; the gradients are still multiplied by the scale, so
the norm is cut in every step to 1/4096 of what was meant."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, local_rank):
        self.local_rank = local_rank
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)).to(local_rank)
        self.model = DDP(net, device_ids=[local_rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scaler = GradScaler(init_scale=2.0**12)

    def step(self, x, y):
        self.optimizer.zero_grad()
        with autocast():
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                self.step(x.to(self.local_rank), y.to(self.local_rank))


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    x = torch.randn(96, 12, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    Trainer(local_rank).fit(DataLoader(data, batch_size=12, sampler=DistributedSampler(data)), epochs=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
