# finds: needless-sync
"""The authors accumulate by hand and believed that Accelerate knows; told nothing, it exchanges gradients in each of
the four backwards of a step."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.abs().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(1 + accelerator.process_index)
    for _ in range(3):
        for i, (x, y) in enumerate(loader, start=1):
            accelerator.backward(F.mse_loss(model(x), y) / 4)
            if i % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
