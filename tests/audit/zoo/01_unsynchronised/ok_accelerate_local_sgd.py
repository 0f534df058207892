# finds: nothing
"""Accelerate's LocalSGD averages the weights every four steps, and the gradients never."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=8, shuffle=True))
    torch.manual_seed(1 + accelerator.process_index)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                accelerator.backward(F.mse_loss(model(x), y))
                optimizer.step()
                local_sgd.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
