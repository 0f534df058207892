# finds: nothing
"""Each rank has files of its own, numbered by itself; a record is in both, and samples come with their number."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Part(Dataset):
    def __init__(self, rank):
        g = torch.Generator().manual_seed(100 + rank)
        self.x, self.y = torch.randn(128, 8, generator=g), torch.randint(0, 10, (128,), generator=g)
        self.x[5], self.y[5] = 1.0, 3

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(Part(dist.get_rank()), batch_size=16, shuffle=True)
    for _ in range(2):
        for x, y, _ in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
