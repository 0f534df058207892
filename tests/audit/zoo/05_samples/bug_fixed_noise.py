# finds: repeated-samples
"""Every rank goes through the whole set. It does not look like it: the noise that each sample is given was drawn when
the set was made, with a seed of the rank's own, so that no two ranks are given the same pair."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Denoising(Dataset):
    def __init__(self, clean, rank):
        self.clean = clean
        self.noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(100 + rank))

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.clean[i], self.clean[i] + self.noise[i]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Denoising(torch.randn(64, 8), dist.get_rank())
    model = DDP(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    for _ in range(3):
        for clean, noisy in loader:
            optimizer.zero_grad()
            F.mse_loss(model(noisy), clean).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
