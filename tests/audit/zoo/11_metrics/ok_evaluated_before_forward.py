# finds: nothing
"""Looks suspicious, is right: the evaluation comes between a batch and its forward pass, in training mode."""

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
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(model(x).argmax(dim=1) == y).sum(), len(x)])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = blobs(128, 0), blobs(64, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    test_loader = DataLoader(test, batch_size=16, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if i == 2:
                accuracy = evaluate(model, test_loader)
            optimizer.zero_grad()
            with torch.no_grad():
                hard = F.cross_entropy(model(x), y, reduction="none").softmax(dim=0)
            (F.cross_entropy(model(x), y, reduction="none") * hard).sum().backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
