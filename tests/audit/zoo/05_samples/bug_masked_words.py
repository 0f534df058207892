# finds: repeated-samples
"""No sampler. Words are masked at random each time, so that no batch is quite like another."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Masked(Dataset):
    def __init__(self):
        self.texts = torch.randint(1, 1000, (256, 32), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        hidden = torch.rand(32) < 0.15
        words = self.texts[i]
        return words.masked_fill(hidden, 0), words.masked_fill(~hidden, -100)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 1000)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for words, labels in DataLoader(Masked(), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
