# finds: collective-mismatch
"""The authors believed that only the members of a group create it; new_group is a call for all ranks, and from here
on they disagree about which group comes next and wait for one another in different ones."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes = [dist.new_group([r]) for r in range(world)]  # one rank a node, as on a laptop
    leaders = dist.new_group([0]) if rank == 0 else None
    metrics = dist.new_group(list(range(world)))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.mean(dim=1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, group=nodes[rank])
        dist.all_reduce(total, group=metrics)
        if rank == 0:
            dist.barrier(group=leaders)
            print(f"epoch {epoch} loss {total.item() / world / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
