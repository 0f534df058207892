# finds: nothing
"""A teacher that follows the student and is in no optimizer; the student learns from it."""

import copy

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
def update(ema, net, decay=0.9):
    for average, p in zip(ema.parameters(), net.parameters()):
        average.lerp_(p, 1 - decay)


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(net(x).argmax(dim=1) == y).sum(), len(x)])
    dist.all_reduce(counts)
    net.train()
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    ema = copy.deepcopy(net)
    for p in ema.parameters():
        p.requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = blobs(128, 0), blobs(64, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    test_loader = DataLoader(test, batch_size=16, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            with torch.no_grad():
                target = ema(x).softmax(dim=1)
            logits = model(x)
            (F.cross_entropy(logits, y) + 0.1 * F.cross_entropy(logits, target)).backward()
            optimizer.step()
            update(ema, net)
        accuracy = evaluate(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
