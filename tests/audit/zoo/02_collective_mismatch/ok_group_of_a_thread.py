# finds: nothing
"""Two groups of the same ranks: a thread beside the training uses the second."""

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def report(group):
    for n in range(20):
        dist.all_reduce(torch.full((n + 1,), 1.0), group=group)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    model = DDP(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    beside = threading.Thread(target=report, args=(second,))
    beside.start()
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(3), group=first)
    beside.join()
    dist.destroy_process_group()


main()
