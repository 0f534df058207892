# finds: local-batch-norm
"""The authors believed that more ranks mean better statistics for BatchNorm; each rank normalises with the six
samples of its own batch, whatever the global batch is."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def block(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU())


def main(rank, world):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(block(10, 32), block(32, 32), nn.Linear(32, 1)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(96, 10, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :1].sin())
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
