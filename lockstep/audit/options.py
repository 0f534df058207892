"""Flags of `lockstep audit`. Imports no torch, so that --help is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass
class Audit:
    """What to watch, and for how long. Then comes the script with its own flags, or -m and a module."""

    nproc: int = 2
    """Ranks to start."""
    steps: int = 20
    """Optimizer steps to watch; 0: until the script ends."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu: CUDA and NCCL are mapped onto the CPU and gloo. auto: cpu if there is no GPU."""
    json: Path | None = None
    """File for the findings, as JSON."""
    html: Path | None = None
    """File for a report: one page with code, timeline and sample ledger."""
    patience: float = 30.0
    """Seconds without progress on any rank after which the script counts as hanging."""
    limit: float = 1800.0
    """Seconds after which the script is killed in any case."""

    def __post_init__(self) -> None:
        for name, least in (("nproc", 1), ("steps", 0), ("patience", 0.1), ("limit", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is at least {least}, not {getattr(self, name)}")
