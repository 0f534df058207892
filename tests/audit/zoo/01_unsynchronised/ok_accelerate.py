# finds: nothing
"""Model, optimizer and loader all go through accelerator.prepare."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_loader():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 10, generator=g)
    return DataLoader(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=16, shuffle=True)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = get_loader()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    set_seed(0, device_specific=True)

    model.train()
    for epoch in range(3):
        total = torch.zeros(1, device=accelerator.device)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = accelerator.reduce(total, reduction="mean") / len(loader)
        accelerator.print(f"epoch {epoch}: loss {mean.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
