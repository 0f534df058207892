"""Fine-tune a language model of Hugging Face on the bytes of text files.

lockstep train examples/huggingface/finetune.py --nproc 2 --out runs/finetune
lockstep export runs/finetune --to hf           # from_pretrained("runs/finetune/export/hf") loads it
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from lockstep import Loss, Pretrained, Recipe, Rng


@dataclass
class Options:
    """What is trained, and on what."""

    weights: str | None = None
    """A model for `from_pretrained`; without it a small GPT-2, initialised at random."""
    text: str = str(Path(json.__file__).parent)
    """A folder of .py or .txt files; by default Python's own json module."""
    length: int = 64
    """Bytes that are predicted in a sample."""


class FineTune(Recipe, Pretrained):
    name = "finetune"
    Options = Options
    defaults = {"n_steps": 200, "batch_size": 16, "lr": 2e-3, "schedule": "cosine", "clip_grad": 1.0, "log_every": 20}

    def model(self) -> nn.Module:
        config = GPT2Config(
            vocab_size=256, n_positions=256, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        if self.options.weights:
            config = AutoConfig.from_pretrained(self.options.weights)
        return AutoModelForCausalLM.from_config(config)

    def load_pretrained(self, model: nn.Module) -> str | None:
        if not self.options.weights:
            return None
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(self.options.weights).state_dict())
        return f"starts from {self.options.weights}"

    def dataset(self, split: str) -> list[Tensor]:
        files = sorted(file for file in Path(self.options.text).iterdir() if file.suffix in (".py", ".txt"))
        text = torch.tensor([*b"".join(file.read_bytes() for file in files)])
        pieces = text.split(self.options.length + 1)
        samples = [F.pad(piece, (0, self.options.length + 1 - len(piece)), value=-100) for piece in pieces]
        return [sample for n, sample in enumerate(samples) if (n % 10 == 9) == (split != "train")]

    def loss(self, model: nn.Module, batch: Tensor, rng: Rng) -> Loss:
        logits = model(input_ids=batch[:, :-1].clamp(min=0), use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        return Loss(total, weight=(batch[:, 1:] != -100).sum())
