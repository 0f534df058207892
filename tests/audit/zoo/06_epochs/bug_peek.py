# finds: same-order
"""The authors look at one batch before each epoch, to print its size, and never call set_epoch: all epochs have the
same order."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    x = torch.arange(128.0).view(-1, 1) / 128
    data = TensorDataset(x, x.square())
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = DDP(nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(3):
        size = len(next(iter(loader))[0])
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(loader)} batches of {size}")
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
