# finds: same-randomness
"""The authors believed that a fixed seed is all that reproducibility needs; it is the same on all ranks, which
therefore draw the same times and the same noise for their samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 1234


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], dim=1))


def loss_of(model, x):
    t = torch.rand(len(x), 1)
    noise = torch.randn_like(x)
    return (model((1 - t) * x + t * noise, t) - (noise - x)).pow(2).mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    model = DDP(Denoiser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(128, 8, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
