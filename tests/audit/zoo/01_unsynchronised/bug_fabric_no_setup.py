# finds: unsynchronised
"""The authors launched Fabric and gave it their loader; the model was moved to the device by hand, so nothing averages
its gradients."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = L.Fabric(accelerator="auto", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 1)).to(fabric.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True))
    fabric.seed_everything(fabric.global_rank)
    for epoch in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        fabric.print(f"epoch {epoch}: {fabric.all_reduce(loss.detach()).item():.3f}")


if __name__ == "__main__":
    main()
