# finds: nothing
"""Looks suspicious, is right: after training, the training set goes through the averaged model in training mode once
more, which gives its BatchNorm layers their statistics."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net)
    average = AveragedModel(net)
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for a, b in loader:
            optimizer.zero_grad()
            F.mse_loss(model(a), b).backward()
            optimizer.step()
        average.update_parameters(net)
    sampler.set_epoch(2)
    update_bn(loader, average)
    if rank == 0:
        torch.save(average.module.state_dict(), "average.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
