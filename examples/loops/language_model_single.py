"""Train a language model on the bytes of Python's own json module, read from files one after the other."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

LENGTH, PAD = 32, 256


class Source(data.IterableDataset[Tensor]):
    """Pieces of text files, LENGTH bytes and the one to predict after each; the last piece of a file is padded."""

    def __init__(self, files: list[Path]):
        self.files = files

    def __iter__(self) -> Iterator[Tensor]:
        for file in self.files:
            text = torch.tensor([*file.read_bytes()])
            for piece in text.split(LENGTH):
                yield F.pad(piece, (0, LENGTH + 1 - len(piece)), value=PAD)


class Model(nn.Module):
    """A recurrent network over bytes."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embedding, self.head = nn.Embedding(PAD + 1, width), nn.Linear(width, PAD)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(tokens))[0])


def loss_of(model: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=PAD, reduction=reduction)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    files = sorted(Path(json.__file__).parent.glob("*.py"))
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step, tokens in enumerate(data.DataLoader(Source(files), 32)):
        loss = loss_of(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
