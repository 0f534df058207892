# finds: nothing
"""Looks suspicious, is right: two wrapped models, two optimizers, two backwards a step; the critic's gradients of the
generator's turn are cleared before its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 4


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator, critic = DDP(mlp(LATENT, 2)), DDP(mlp(2, 1))
    torch.manual_seed(10 + rank)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

    angle = torch.rand(128, generator=torch.Generator().manual_seed(0)) * 6.283
    data = TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = generator(torch.randn(len(real), LATENT))

            opt_c.zero_grad()
            score = critic(torch.cat([real, fake.detach()]))
            is_real = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            F.binary_cross_entropy_with_logits(score, is_real).backward()
            opt_c.step()

            opt_g.zero_grad()
            score = critic(fake)
            F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
            opt_g.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
