# finds: nothing
"""Looks suspicious, is right: LBFGS calls its closure, and so backward, several times a step; the loss it decides by
is that of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
    y = x.prod(dim=1, keepdim=True)
    x, y = x[rank::world], y[rank::world]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / world

    for step in range(8):
        loss = optimizer.step(closure)
        if rank == 0 and step % 4 == 3:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
