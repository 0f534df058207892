# finds: dropped-samples
"""The authors gave both loaders the same arguments; the last batch of every shard of the test set is left out."""

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


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = blobs(200, 0), blobs(90, 1)
    sampler = DistributedSampler(train)
    options = {"batch_size": 16, "drop_last": True}
    loader = DataLoader(train, sampler=sampler, **options)
    test_loader = DataLoader(test, sampler=range(rank, len(test), world), **options)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        counts = torch.zeros(2)
        for x, y in test_loader:
            with torch.no_grad():
                counts += torch.tensor([(model(x).argmax(dim=1) == y).sum(), len(x)])
        dist.all_reduce(counts)
        model.train()
        if rank == 0:
            print(f"epoch {epoch} accuracy {(counts[0] / counts[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
