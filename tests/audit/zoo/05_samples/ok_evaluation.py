# finds: nothing
"""63 test samples on two ranks, each counted once: the shards are cut by hand and the sums are reduced."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return TensorDataset(torch.randn(n, 6, generator=g) + y[:, None], y)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct, seen = torch.zeros((), device=device), torch.zeros((), device=device)
    for x, y in loader:
        correct += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
        seen += len(x)
    dist.all_reduce(correct)
    dist.all_reduce(seen)
    model.train()
    return correct / seen


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(device), device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = blobs(128, 0), blobs(63, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    shard = Subset(test, range(rank, len(test), world))
    test_loader = DataLoader(shard, batch_size=16)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
