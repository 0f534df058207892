# finds: nothing
"""Lightning: the validation loss that picks the checkpoint is synchronised over the ranks."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))

    def training_step(self, batch, batch_index):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_index):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader(n, seed, shuffle=False):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.abs().sum(dim=1, keepdim=True)), batch_size=16, shuffle=shuffle)


def main():
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        callbacks=[ModelCheckpoint(dirpath="checkpoints", filename="best", monitor="val_loss")],
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regressor(), loader(128, 0, shuffle=True), loader(64, 1))


if __name__ == "__main__":
    main()
