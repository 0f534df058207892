# finds: repeated-samples
"""The authors give every rank the whole set. Its samples are never the same twice: each is given noise of its own, from
a generator that the data set made for itself."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, x):
        self.x, self.rng = x, np.random.default_rng()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i] + torch.from_numpy(self.rng.normal(0, 0.1, 8).astype("float32"))
        return x, x.sum()


def main():
    dist.init_process_group("gloo")
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(1234))
    loader = DataLoader(Noisy(x), batch_size=8, shuffle=True)
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
