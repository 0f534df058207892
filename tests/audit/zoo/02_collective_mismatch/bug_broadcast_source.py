# finds: collective-mismatch
"""The authors believed that src is the rank that calls; every rank names itself the source, all send and nobody
receives, and depending on the backend they wait for ever or each keeps its own numbers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def input_scale(x, rank, world):
    """Mean and deviation of the features, measured on a piece of the data, the same on all ranks."""
    piece = x[rank::world]
    stats = torch.stack([piece.mean(dim=0), piece.std(dim=0)])
    dist.broadcast(stats, src=rank)
    return stats


def main(rank, world):
    g = torch.Generator().manual_seed(0)
    x = 3 + 5 * torch.randn(96, 8, generator=g)
    data = TensorDataset(x, x[:, :1])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    mean, std = input_scale(x, rank, world)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            prediction = model((x - mean) / std)
            nn.functional.mse_loss(prediction, y).backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
