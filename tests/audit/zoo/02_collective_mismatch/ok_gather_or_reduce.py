# finds: nothing
"""All ranks gather the scores of the evaluation; rank 0 reports."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def loader_for(n, seed, shuffle):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    data = TensorDataset(x, (x.sum(dim=1) > 0).float())
    return DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=shuffle))


@torch.no_grad()
def evaluate(model, loader, rank, world):
    correct = torch.zeros(1)
    for x, y in loader:
        correct += ((model(x).squeeze(1) > 0) == y.bool()).sum()
    parts = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(parts, correct)
    if rank == 0:
        print(f"accuracy {sum(parts).item() / len(loader.dataset):.3f}")


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_loader, test_loader = loader_for(128, 0, True), loader_for(64, 1, False)
    for epoch in range(2):
        train_loader.sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x).squeeze(1), y).backward()
            optimizer.step()
    evaluate(model, test_loader, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
