# finds: local-metric
"""The authors believed that rank 0 prints the accuracy on the test set; it is the accuracy on its own half of it."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def dataset(n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    counts = torch.zeros(2, device="cuda")
    for x, y in loader:
        counts[0] += (model(x.cuda()).argmax(dim=1) == y.cuda()).sum()
        counts[1] += len(y)
    return counts[0] / counts[1]


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).cuda()
    model = DDP(model, device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = dataset(128, 0), dataset(64, 1)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=16, sampler=sampler)
    test_loader = DataLoader(test, batch_size=16, sampler=DistributedSampler(test, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader)
        if rank == 0:
            print(f"epoch {epoch} test accuracy {accuracy.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
