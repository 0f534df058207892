# finds: schedule-too-fast
"""The authors count the steps of the prepared loader, which is that of one rank. Accelerate steps a prepared schedule
once for each rank: the rate is 0 after half of the training."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3


def linear_decay(optimizer, total):
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    prepared = accelerator.prepare(loader)
    scheduler = linear_decay(optimizer, EPOCHS * len(prepared))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    torch.manual_seed(1 + accelerator.process_index)
    for _ in range(EPOCHS):
        for x, y in prepared:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
