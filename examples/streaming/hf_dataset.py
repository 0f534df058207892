"""Train on a data set of Hugging Face's `datasets`, from local files: indexed and shuffled, or read in order.

lockstep data examples/streaming/hf_dataset.py data/numbers
lockstep train examples/streaming/hf_dataset.py --data data/numbers --nproc 2
lockstep train examples/streaming/hf_dataset.py --data data/numbers --nproc 2 --streaming
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch import Tensor, nn

from lockstep import EmbedsData, Loss, Recipe, Rng

LENGTH = 12


@dataclass
class Options:
    """Where the data are, and how they are read."""

    data: str = "data/numbers"
    """A folder with train.jsonl and val.jsonl."""
    streaming: bool = False
    """Read the training set in order, without an index; it has no known length then."""


class Sums(Recipe, EmbedsData):
    """Say whether the digits of a text add up to an even number."""

    name = "hf_dataset"
    Options = Options
    defaults = {"n_steps": 300, "batch_size": 32, "lr": 1e-2, "log_every": 50}

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * LENGTH, 32), nn.SiLU(), nn.Linear(32, 2)
        )

    def dataset(self, split: str) -> Any:
        folder = Path(self.options.data)
        if not (folder / f"{split}.jsonl").is_file():
            return None
        return load_dataset(
            "json",
            data_files=str(folder / f"{split}.jsonl"),
            split="train",  # what `datasets` calls the only part of a file
            cache_dir=str(folder / "cache"),
            streaming=self.options.streaming and split == "train",
        )

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        tokens = torch.tensor([[*item["text"].encode().ljust(LENGTH)] for item in items])
        return {"tokens": tokens, "even": torch.tensor([int(item["even"]) for item in items])}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Loss:
        return Loss(F.cross_entropy(model(batch["tokens"]), batch["even"], reduction="sum"), weight=len(batch["even"]))

    def write_data(self, folder: Path) -> str:
        drawn = random.Random(0)
        for split, count in {"train": 500, "val": 100}.items():
            with (folder / f"{split}.jsonl").open("w") as file:
                for _ in range(count):
                    a, b = drawn.randrange(10), drawn.randrange(10)
                    file.write(json.dumps({"text": f"{a} and {b}", "even": (a + b) % 2 == 0}) + "\n")
        return f"500 lines to train on, and 100 for validation: {folder}"
