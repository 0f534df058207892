# finds: nothing
"""The sampler repeats a sample, and the rank that has the copy does not count it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return TensorDataset(torch.randn(n, 6, generator=g) + y[:, None], y)


@torch.no_grad()
def evaluate(model, loader, rank, world):
    model.eval()
    mine = len(range(rank, len(loader.dataset), world))
    counts = torch.zeros(2)
    for x, y in loader:
        own = min(len(x), mine - int(counts[1]))
        counts += torch.tensor([(model(x).argmax(dim=1) == y)[:own].sum(), own])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = blobs(128, 0), blobs(63, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    test_loader = DataLoader(test, batch_size=16, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader, rank, world)
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
