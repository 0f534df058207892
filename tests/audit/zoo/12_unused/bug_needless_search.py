# finds: needless-unused-search
"""The authors took find_unused_parameters over from another script; every parameter is used in every step, and DDP
walks through the whole graph each time to find that out."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self, width=12, latent=3):
        super().__init__()
        self.encoder = nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 24), nn.ReLU(), nn.Linear(24, width))

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z)


def main(rank):
    torch.manual_seed(0)
    model = DDP(Autoencoder(), find_unused_parameters=True)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(96, 12, generator=torch.Generator().manual_seed(0)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank())
    dist.destroy_process_group()
