# finds: nothing
"""Looks suspicious, is right: rank 0 and the others call all_reduce at different lines, but it is the same reduction
of the same shape."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Leader:
    def report(self, epoch, total, count):
        dist.all_reduce(total)
        print(f"epoch {epoch}: loss {total.item() / count:.4f}")


class Follower:
    def report(self, epoch, total, count):
        dist.all_reduce(total)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    reporter = Leader() if rank == 0 else Follower()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).cuda(), device_ids=[local_rank])
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.amax(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device="cuda")
        for x, y in loader:
            loss = F.mse_loss(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        reporter.report(epoch, total, world * len(loader))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
