# finds: padded-evaluation
"""Accelerate fills up the last batch of 71 test samples with samples from the beginning; `gather` returns them too,
and they count twice."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train = DataLoader(blobs(128, 0), batch_size=16, shuffle=True)
    test = DataLoader(blobs(71, 1), batch_size=16)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
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
            prediction, y = accelerator.gather((prediction, y))
            hits += (prediction == y).sum().item()
            seen += len(y)
        accelerator.print(f"epoch {epoch} accuracy {hits / seen:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
