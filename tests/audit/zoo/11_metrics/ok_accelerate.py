# finds: nothing
"""Accelerate: predictions and labels of all ranks are gathered before the accuracy is computed."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def loader(n, seed, shuffle):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=16, shuffle=shuffle)


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, loader(128, 0, True), loader(64, 1, False))
    torch.manual_seed(1 + accelerator.process_index)
    for epoch in range(2):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        model.eval()
        hits, seen = 0, 0
        for x, y in test:
            with torch.no_grad():
                prediction = model(x).argmax(dim=1)
            prediction, y = accelerator.gather_for_metrics((prediction, y))
            hits += (prediction == y).sum().item()
            seen += len(y)
        accelerator.print(f"epoch {epoch} accuracy {hits / seen:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
