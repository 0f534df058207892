# finds: unseen-samples
"""The authors sharded the set by hand and then let a DistributedSampler do its work; that shards each rank's part
once more, and half of the samples are missing from every epoch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Task:
    def __init__(self):
        self.cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        x = torch.randn(128, 10, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(x, x.pow(2).mean(dim=1, keepdim=True))
        self.shard = Subset(data, range(self.rank, len(data), self.world))
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)).to(self.device))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def loader(self, epoch):
        shuffle = DistributedSampler(self.shard)
        shuffle.set_epoch(epoch)
        return DataLoader(self.shard, batch_size=8, sampler=shuffle)

    def run(self, epochs):
        for epoch in range(epochs):
            for x, y in self.loader(epoch):
                loss = nn.functional.mse_loss(self.model(x.to(self.device)), y.to(self.device))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


if __name__ == "__main__":
    Task().run(epochs=2)
    dist.destroy_process_group()
