# finds: differing-schedule
# also: unsynchronised
"""The authors believed that every rank computes the validation loss; each has that of its own shard, and where it
stops falling the learning rate is cut on that rank alone."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make(n, seed, mislabelled=False):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    y = (x[:, 0] > 0).long()
    if mislabelled:
        y[1::2] = 1 - y[1::2]
    return TensorDataset(x, y)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total = torch.zeros((), device="cuda")
    for x, y in loader:
        total += F.cross_entropy(model(x.cuda()), y.cuda(), reduction="sum")
    model.train()
    return total.item() / len(loader.dataset)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 2).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    train, val = make(128, 0), make(64, 1, mislabelled=True)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val, batch_size=16, sampler=DistributedSampler(val, shuffle=False))
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        scheduler.step(validate(model, val_loader))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
