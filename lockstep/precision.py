"""bf16, fp16 with a scaler, fp32, and fp64 for proofs."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import Hardware


class Scaler:
    """Keeps fp16 gradients in range: loss × scale. Halved at each overflow, doubled after 2,000 steps without one.

    All of it stays on the device, so no step waits to learn whether it overflowed.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, device: torch.device, scale: float = 2.0**16):
        self.scale = torch.tensor(scale, device=device)
        self.good_steps = torch.tensor(0, device=device)

    def update(self, bad: Tensor, discard: Tensor | None = None) -> None:
        """Adapt the scale; `bad`: whether this step's gradient was not finite, the same on every rank.

        With `discard` nothing changes: the step will be done again.
        """
        scale, good_steps = self.scale, self.good_steps
        self.good_steps = torch.where(bad, 0, self.good_steps + 1)
        grow = self.good_steps >= self.GROWTH_INTERVAL
        self.scale = torch.where(bad, self.scale * 0.5, torch.where(grow, self.scale * 2, self.scale))
        self.good_steps = torch.where(grow, 0, self.good_steps)
        if discard is not None:
            self.scale = torch.where(discard, scale, self.scale)
            self.good_steps = torch.where(discard, good_steps, self.good_steps)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale.item(), "good_steps": self.good_steps.item()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(int(state["good_steps"]))


@dataclass
class Precision:
    """How the model computes; its weights are stored in `dtype`."""

    name: str
    dtype: torch.dtype
    autocast: AbstractContextManager[Any]
    scaler: Scaler | None


def choose(hardware: Hardware, device: torch.device) -> Precision:
    """Return the precision of the settings; `auto`: bf16 or fp16 on a GPU that has it, fp32 on a CPU."""
    name = hardware.precision
    if name == "auto":
        name = (
            "fp32"
            if device.type == "cpu"
            else "bf16"
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else "fp16"
        )
    if device.type == "cuda" and name != "fp64":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("highest" if name == "fp32" else "high")
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    dtype = torch.float64 if name == "fp64" else torch.float32
    torch.set_default_dtype(dtype)
    autocast = torch.autocast(device.type, dtype=half or torch.bfloat16, enabled=half is not None)
    return Precision(name, dtype, autocast, Scaler(device) if name == "fp16" else None)
