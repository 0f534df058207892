# finds: drifting-buffers
"""The authors switched broadcast_buffers off to save a message and believed that buffers do not matter; the running
scale follows each rank's own data, and the ranks no longer compute the same function."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Normalise(nn.Module):
    """Divides by a running average of the features' size."""

    def __init__(self, width, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        if self.training:
            size = x.detach().abs().mean(dim=0)
            self.scale.lerp_(size, self.momentum)
        return x / self.scale


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(Normalise(8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = 4 * torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
