"""Geometry in space: torsions, local frames, atoms from bond lengths and angles, circular bins.

Points are (..., 3); angles are radians unless named degrees. Sums of products are written out and not as matrix
products, which autocast would compute in half precision.
"""

import torch
from torch import Tensor

BINS = 72
"""Of a full turn; 5 degrees each, the first begins at −180."""
_SMALL = 1e-12


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def unit(v: Tensor) -> Tensor:
    """The direction of a vector; 0 for the null vector."""
    return v / dot(v, v).clamp(min=_SMALL).sqrt()[..., None]


def cross(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.cross(a, b, dim=-1)


def torsion(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The angle in (−π, π] by which d is turned against a, seen along the bond from b to c, clockwise positive."""
    first, axis, last = b - a, c - b, d - c
    length = dot(axis, axis).clamp(min=_SMALL).sqrt()
    across = cross(axis, last)
    return torch.atan2(length * dot(first, across), dot(cross(first, axis), across))


def place_atom(a: Tensor, b: Tensor, c: Tensor, length: float, angle: Tensor | float, turn: Tensor | float) -> Tensor:
    """The point at `length` from c, under `angle` with b, such that a, b, c and it have the torsion `turn`."""
    angle, turn = (torch.as_tensor(x, dtype=c.dtype, device=c.device)[..., None] for x in (angle, turn))
    axis = unit(c - b)
    normal = unit(cross(b - a, axis))
    side = cross(normal, axis)
    return c + length * (angle.sin() * (turn.cos() * side + turn.sin() * normal) - angle.cos() * axis)


def frames(n: Tensor, ca: Tensor, c: Tensor) -> Tensor:
    """(..., 3, 3): the axes of the residue's local frame as rows; 0 where they are not determined."""
    first = unit(c - ca)
    second = unit((n - ca) - dot(n - ca, first)[..., None] * first)
    return torch.stack([first, second, cross(first, second)], dim=-2)


def wrapped(degrees: Tensor, period: Tensor | float = 360.0) -> Tensor:
    """The same angle in [−period/2, period/2)."""
    return torch.remainder(degrees + period / 2, period) - period / 2


def to_bins(degrees: Tensor, symmetric: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two bins whose centres are nearest to an angle, on the circle, and the second one's weight.

    A symmetric torsion counts modulo 180 degrees: it uses the first half of the bins, closed to a circle.
    """
    bins = torch.where(symmetric, BINS // 2, BINS)
    position = torch.remainder(degrees + 180.0, 360.0) * (BINS / 360.0) - 0.5
    below = position.floor()
    lower = below.to(torch.int64)
    return torch.remainder(lower, bins), torch.remainder(lower + 1, bins), position - below


def bin_centres(like: Tensor) -> Tensor:
    """(72,) in degrees."""
    return (torch.arange(BINS, dtype=like.dtype, device=like.device) + 0.5) * (360.0 / BINS) - 180.0


def from_bins(probability: Tensor, symmetric: Tensor) -> Tensor:
    """(..., 72) to degrees: the most likely bin, moved towards the more likely of its two neighbours."""
    half = probability[..., : BINS // 2] + probability[..., BINS // 2 :]
    return torch.where(symmetric, _peak(half, 180.0), _peak(probability, 360.0))


def _peak(probability: Tensor, period: float) -> Tensor:
    bins = probability.shape[-1]
    best = probability.argmax(-1, keepdim=True)
    weight = probability.gather(-1, torch.remainder(best + torch.arange(-1, 2, device=best.device), bins))
    moved = (weight[..., 2] - weight[..., 0]) / weight.sum(-1)
    return wrapped((best.squeeze(-1) + 0.5 + moved) * (period / bins) - 180.0)


def within(probability: Tensor, degrees: Tensor, symmetric: Tensor, limit: float = 20.0) -> Tensor:
    """Return the probability (..., 72) within `limit` degrees of an angle (...)."""
    period = torch.where(symmetric, 180.0, 360.0)[..., None]
    near = wrapped(bin_centres(probability) - degrees[..., None], period).abs() <= limit
    return (probability * near).sum(-1)
