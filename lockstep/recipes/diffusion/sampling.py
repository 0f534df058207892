"""From noise to images: classifier-free guidance, Euler and Heun steps, frames of the trajectory."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

FRAMES = 13
"""Frames of a trajectory by default."""

Velocity = Callable[[Tensor, float], Tensor]
"""velocity(x, progress): towards the images, where progress runs from 0 (noise) to 1 (image)."""


def guided(model: nn.Module, x: Tensor, t: float, label: Tensor, none: int, cfg: float) -> Tensor:
    """Return model(x, t, label), moved away from the answer for the label `none` by the factor `cfg`.

    Both answers come from one doubled batch; `cfg` 1 is no guidance and doubles nothing.
    """
    time = torch.full_like(x[:, 0, 0, 0], t)
    if cfg == 1:
        return model(x, time, label).to(x.dtype)
    labels = torch.cat([label, torch.full_like(label, none)])
    conditional, unconditional = model(x.repeat(2, 1, 1, 1), time.repeat(2), labels).to(x.dtype).chunk(2)
    return unconditional + cfg * (conditional - unconditional)


def integrate(velocity: Velocity, noise: Tensor, steps: int, frames: int, heun: bool) -> Tensor:
    """Return the trajectory (n, frames, 3, S, S) from noise (n, 3, S, S) to images, in [0, 1], the images last.

    Steps are Euler's, or Heun's but for the last one, which ends where the velocity may not be defined.
    """
    x, saved = noise, frame_steps(steps, frames)
    states = {0: x}
    for i in range(steps):
        v = velocity(x, i / steps)
        ahead = x + v / steps
        if heun and i + 1 < steps:
            ahead = x + (v + velocity(ahead, (i + 1) / steps)) / 2 / steps
        x = ahead
        if i + 1 in saved:
            states[i + 1] = x
    return torch.stack([((states[k] + 1) / 2).clamp(0, 1) for k in saved], dim=1)


def frame_steps(steps: int, frames: int) -> list[int]:
    """Return after which of 0 … steps steps to save a frame: evenly spread, with the last, and the first if frames > 1.

    There are fewer frames where there are fewer steps.
    """
    return sorted({steps if frames == 1 else round(k * steps / (frames - 1)) for k in range(frames)})
