# finds: nothing
"""Nobody seeds numpy, which then begins with what the system gives it: something else in every process."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Augmented(Dataset):
    def __init__(self, n):
        self.x = np.random.default_rng(0).normal(size=(n, 8)).astype("float32")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        jitter = np.random.normal(0, 0.1, size=8).astype("float32")
        return torch.from_numpy(self.x[i] + jitter), torch.tensor(self.x[i].sum())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    data = Augmented(96)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
