# finds: nothing
"""All ranks reduce the loss, one of them prints it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    def __init__(self, n):
        self.phase = torch.rand(n, generator=torch.Generator().manual_seed(0)) * 6.28

    def __len__(self):
        return len(self.phase)

    def __getitem__(self, i):
        return torch.sin(torch.linspace(0, 6.28, 32) + self.phase[i]), self.phase[i].cos()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--log-every", default=4, type=int)
    args = parser.parse_args()

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if backend == "nccl" else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    dataset = Waves(128)
    sampler = DistributedSampler(dataset, world, rank)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader, start=1):
            loss = (model(x.to(device)).squeeze(1) - y.to(device)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % args.log_every == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"epoch {epoch} step {step} loss {mean.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
