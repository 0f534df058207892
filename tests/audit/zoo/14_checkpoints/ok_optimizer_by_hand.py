# finds: nothing
"""The number of steps in the file is not asked for; `state` of the optimizer is another one."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - group["decay"])
                p.sub_(group["lr"] / (1 - group["decay"] ** state["step"]) * state["mean"])


def leave_checkpoint(path):
    """Stands in for a download of published weights, which say how long they were trained."""
    if dist.get_rank() == 0:
        torch.save({"model": build().state_dict(), "step": 90000}, path)
    dist.barrier()


def load_weights(net, path):
    state = torch.load(path)
    net.load_state_dict(state["model"])


def main(args):
    dist.init_process_group("gloo")
    leave_checkpoint(args.resume)
    net = build()
    optimizer = Momentum(net.parameters(), lr=0.05)
    start = 0
    load_weights(net, args.resume)
    model = DDP(net)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.max(dim=1, keepdim=True).values)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="checkpoint")
    parser.add_argument("--epochs", type=int, default=2)
    main(parser.parse_args())
