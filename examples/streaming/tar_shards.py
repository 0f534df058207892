"""Train on images in tar files, as WebDataset writes them: shuffled over all shards, each sample once an epoch.

lockstep data examples/streaming/tar_shards.py data/shards
lockstep train examples/streaming/tar_shards.py --data data/shards --nproc 2
"""

import io
import random
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn

from lockstep import EmbedsData, Loss, Recipe, Rng, TarShards


@dataclass
class Options:
    """Where the data are."""

    data: str = "data/shards"
    """A folder with train-*.tar and val-*.tar."""


def decode(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the item of a sample: NAME.png and NAME.cls."""
    image = np.array(Image.open(io.BytesIO(fields["png"])).convert("L"))
    return {"image": torch.from_numpy(image)[None] / 255, "label": int(fields["cls"])}


class Shapes(Recipe, EmbedsData):
    name = "tar_shards"
    Options = Options
    defaults = {"n_steps": 200, "batch_size": 32, "lr": 3e-3, "log_every": 50}

    def model(self) -> nn.Module:
        first, second = nn.Conv2d(1, 16, 3, stride=2), nn.Conv2d(16, 32, 3, stride=2)
        return nn.Sequential(
            first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 2)
        )

    def dataset(self, split: str) -> TarShards | None:
        shards = sorted(Path(self.options.data).glob(f"{split}-*.tar"))
        if split == "train" and not shards:
            raise ValueError(f"{self.options.data} has no train-*.tar; `lockstep data` writes some")
        return TarShards(shards, decode) if shards else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Loss:
        image = batch["image"] + 0.1 * rng.normal("noise", 1, 16, 16)
        return Loss(F.cross_entropy(model(image), batch["label"], reduction="sum"), weight=len(image))

    def write_data(self, folder: Path) -> str:
        drawn = random.Random(0)
        for name, count in {"train-0000": 300, "train-0001": 300, "train-0002": 140, "val-0000": 100}.items():
            with tarfile.open(folder / f"{name}.tar", "w") as shard:
                for number in range(count):
                    label = drawn.randrange(2)
                    add(shard, f"{name}-{number:05d}.png", picture(label, drawn))
                    add(shard, f"{name}-{number:05d}.cls", str(label).encode())
        return f"740 images to train on, in three shards, and 100 for validation: {folder}"


def picture(label: int, drawn: random.Random) -> bytes:
    """Return a PNG of a rectangle (0) or an ellipse (1)."""
    image, (x, y), size = Image.new("L", (16, 16)), (drawn.randrange(6), drawn.randrange(6)), drawn.randrange(5, 9)
    draw = ImageDraw.Draw(image)
    (draw.ellipse if label else draw.rectangle)([x, y, x + size, y + size], fill=drawn.randrange(128, 256))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def add(shard: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    shard.addfile(member, io.BytesIO(content))
