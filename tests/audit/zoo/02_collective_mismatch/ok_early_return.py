# finds: nothing
"""A rank without evaluation samples still takes part in the reduction, with zeros."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PIECE = 48  # evaluation samples that one rank takes


def tensors(n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > x[:, 1]).long()


@torch.no_grad()
def evaluate(model, rank, device):
    x, y = (t[rank * PIECE : (rank + 1) * PIECE].to(device) for t in tensors(48, seed=1))
    counts = torch.zeros(2, device=device)
    if len(x) > 0:
        counts[0] = (model(x).argmax(dim=1) == y).sum()
        counts[1] = len(x)
    dist.all_reduce(counts)
    if rank == 0:
        print(f"accuracy {(counts[0] / counts[1]).item():.3f}")


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    data = TensorDataset(*tensors(128, seed=0))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    evaluate(model, rank, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
