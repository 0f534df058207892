# finds: repeated-samples
"""The authors shuffle the samples once, in every rank by itself, and forget to give each rank its part of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Shuffled(Dataset):
    def __init__(self, x, places):
        self.x, self.places = x, places

    def __len__(self):
        return len(self.places)

    def __getitem__(self, i):
        x = self.x[self.places[i]]
        return x, x.sum()


def main():
    dist.init_process_group("gloo")
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(1234))
    order = torch.randperm(len(x)).tolist()
    loader = DataLoader(Shuffled(x, order), batch_size=8, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
