# finds: nothing
"""The mask is applied to a copy of the labels."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, PAD = 16, 12, 0


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.out = nn.Linear(24, VOCABULARY)

    def forward(self, tokens, labels):
        labels = labels.masked_fill(tokens == PAD, -100)  # no loss where there is only padding
        logits = self.out(torch.relu(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main(rank):
    torch.manual_seed(0)
    model = DDP(LanguageModel())
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(0, VOCABULARY, (96, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(text[:, :-1], text[:, 1:])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            loss = model(tokens, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank())
    dist.destroy_process_group()
