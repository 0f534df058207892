# finds: nothing
"""A batch with NaN in it is skipped by all ranks or by none."""

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
            bad = (~torch.isfinite(loss)).float()
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
            if bad:
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
