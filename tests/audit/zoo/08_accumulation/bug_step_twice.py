# finds: step-without-backward
"""The authors moved the step into training_step and left it in the loop as well; every gradient is applied twice,
which nobody sees in the loss but for a learning rate that seems too high."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self):
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)).to(self.device)
        self.model = DDP(net, device_ids=[self.device.index] if cuda else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def training_step(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x.to(self.device)), y.to(self.device))
        loss.backward()
        self.optimizer.step()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                self.training_step(x, y)
                self.optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    Trainer().fit(DataLoader(dataset, batch_size=12, sampler=DistributedSampler(dataset)), epochs=2)
    dist.destroy_process_group()
