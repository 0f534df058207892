"""The Fréchet distance between generated images and those of the training set, computed by all ranks together.

With Inception's weights it is FID and called `fid`; with EfficientNet-Lite0's it is called `fd_efficientnet`, which
compares runs with one another and must not be compared with published FIDs.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from ...files import replacing
from ...recipe import SumOverRanks, Sums
from ...rng import Rng
from ..images import Images
from .features import EfficientNetLite0, Inception

_REAL_BATCH = 128


def distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """|μa − μb|² + tr(Σa + Σb − 2·(Σa·Σb)^½), in float64.

    The trace of the root is that of (Σa^½ · Σb · Σa^½)^½, which is symmetric: its eigenvalues are real and not
    negative, up to rounding.
    """
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)


def moments(sums: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased covariance (divided by n − 1) from the sums of `feature_sums`."""
    count, total = float(sums["count"]), sums["sum"].double()
    mean = total / count
    return mean, (sums["products"].double() - count * torch.outer(mean, mean)) / (count - 1)


def feature_sums(features: Tensor) -> Sums:
    """Return what to add up over all features (n, d): their count, sum and outer products."""
    features = features.double()
    return {"count": len(features), "sum": features.sum(0), "products": features.T @ features}


class Distance:
    """The distance of generated images to the real ones. Statistics of the real ones are cached on disk."""

    def __init__(self, images: Images, weights: str | None, device: torch.device):
        self.images, self.device = images, device
        self.network = (Inception(Path(weights)) if weights else EfficientNetLite0()).to(device, torch.float32)

    @property
    def name(self) -> str:
        return str(self.network.name)

    def __call__(self, sum_over_ranks: SumOverRanks, count: int, batch: int, generate: Callable[[range, Rng], Tensor], cache: Path) -> float:  # fmt: skip  # noqa: E501
        """`generate(numbers, rng)` makes images (n, 3, S, S) with values 0 … 1."""
        real = self._reference(sum_over_ranks, cache / f"{self.name}-{fingerprint(self.images)}.safetensors")
        # Rounded to 8 bits, as in an image file.
        generated = moments(
            sum_over_ranks(count, batch, lambda n, rng: self._sums((generate(n, rng) * 255 + 0.5).to(torch.uint8)))
        )
        return distance(*generated, *moments(real))

    def _sums(self, images: Tensor) -> Sums:
        with torch.autocast(self.device.type, enabled=False):
            return feature_sums(self.network(images.to(self.device)))

    def _reference(self, sum_over_ranks: SumOverRanks, file: Path) -> dict[str, Tensor]:
        """Sums over the real images. A total over a single number is rank 0's: it alone reads and writes the file."""
        if cached := sum_over_ranks(1, 1, lambda *_: _read(file)):
            return cached
        real = sum_over_ranks(
            len(self.images), _REAL_BATCH, lambda n, _: self._sums(torch.stack([self.images[i]["image"] for i in n]))
        )
        sum_over_ranks(1, 1, lambda *_: _write(real, file))
        return real


def _read(file: Path) -> Sums:
    with suppress(OSError, ValueError, safetensors.SafetensorError):
        sums = safetensors.torch.load(file.read_bytes())
        return {**sums} if all(torch.isfinite(value).all() for value in sums.values()) else {}
    return {}


def _write(sums: dict[str, Tensor], file: Path) -> Sums:
    with suppress(OSError):  # without a cache it is computed again
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            safetensors.torch.save_file({name: value.contiguous() for name, value in sums.items()}, temporary)
    return {}


def fingerprint(images: Images) -> str:
    """Return a hash of the images: of their number and of the pixels of some of them."""
    digest = hashlib.sha256(f"{len(images)} {images.names}".encode())
    for i in range(0, len(images), max(1, len(images) // 32)):
        item = images[i]
        digest.update(item["image"].numpy().tobytes() + item["label"].numpy().tobytes())
    return digest.hexdigest()[:16]
