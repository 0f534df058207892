# finds: nothing
"""Looks suspicious, is right: each step takes a batch of two loaders, one with labels and one without, and the fit on
the training set itself is measured now and then, in the middle of an epoch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def accuracy(model, loader):
    hits = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            hits += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(hits)
    return hits[0] / hits[1]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    labelled, unlabelled = random_split(data, [64, 96], generator=torch.Generator().manual_seed(0))
    samplers = [DistributedSampler(part) for part in (labelled, unlabelled)]
    few, many = DataLoader(labelled, 8, sampler=samplers[0]), DataLoader(unlabelled, 12, sampler=samplers[1])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for step, ((a, y), (b, _)) in enumerate(zip(few, many)):
            if step == 2:
                fit = accuracy(model, few)
                if rank == 0:
                    print(f"epoch {epoch} accuracy {fit:.3f}")
            logits = model(torch.cat([a, b]))
            loss = F.cross_entropy(logits[:8], y) + 0.1 * logits[8:].softmax(1).square().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
