# finds: unsynchronised
"""The authors believed that biases are too small to be worth a message; they skip all vectors when averaging, so the
biases of the ranks drift apart, and with them everything else."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.world = dist.get_world_size()
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()

    def average_gradients(self):
        for p in self.model.parameters():
            if p.grad is not None and p.dim() > 1:
                dist.all_reduce(p.grad)
                p.grad /= self.world

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                self.optimizer.zero_grad()
                self.criterion(self.model(x), y).backward()
                self.average_gradients()
                self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 8, generator=g)
    y = (x.norm(dim=1) > 2.7).long()
    data = TensorDataset(x, y)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    torch.manual_seed(0)
    trainer = Trainer(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), lr=0.05)
    torch.manual_seed(dist.get_rank())
    trainer.fit(loader, epochs=3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
