# finds: uneven-steps
# also: collective-mismatch
"""The authors believed that a bad batch can just be skipped; the rank that met it takes one step less, and from then
on gradients of different steps are averaged, until one rank is left waiting."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Regression:
    def __init__(self):
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
        y = x.sum(dim=1, keepdim=True)
        y[17] = float("nan")  # a sensor that failed once
        self.data = TensorDataset(x, y)
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, batch_size=16, sampler=self.sampler)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for x, y in self.loader:
            loss = (self.model(x) - y).pow(2).mean()
            if not torch.isfinite(loss):
                continue
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    task = Regression()
    for epoch in range(3):
        task.train_epoch(epoch)
    dist.destroy_process_group()
