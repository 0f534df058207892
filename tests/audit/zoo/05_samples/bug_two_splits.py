# finds: overlapping-splits
"""The authors split twice, once for each part, and believed that the parts belong together; the seeds differ, and
most validation samples are trained on."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def splits(dataset, seed):
    return random_split(dataset, [128, 32], generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def validate(model, loader):
    hits = torch.zeros(1)
    for x, y in loader:
        hits += (model(x).argmax(dim=1) == y).sum()
    dist.all_reduce(hits)
    return hits.item() / len(loader.dataset)


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 2)))
    torch.manual_seed(args.seed + rank)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(160, 6, generator=g)
    dataset = TensorDataset(x, (x[:, 0] > x[:, 1] ** 2).long())
    train_set, _ = splits(dataset, args.seed)
    _, val_set = splits(dataset, args.seed + 1)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = validate(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch} accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
