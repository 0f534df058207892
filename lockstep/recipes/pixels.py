"""Image files read and written, ImageNet's normalisation, Pascal VOC's colours."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..files import replacing

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue: what pretrained weights expect."""
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def data_folder(path: str, remedy: str = "correct --data_path") -> Path:
    """Return the folder that `data_path` names, which has to exist."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"data_path is a folder, {path} {'is a file' if folder.exists() else 'is missing'}; {remedy}")
    return folder


def image_files(folder: Path) -> list[Path]:
    """Return the image files in a folder and below, sorted, without hidden ones."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, n) for n in names if not n.startswith(".") and n.lower().endswith(ENDINGS)]
    return sorted(found)


def save_image(image: Image.Image, path: Path, **options: Any) -> Path:
    """Save in the format of the path's suffix, with the options of that format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        image.save(temporary, Image.registered_extensions()[path.suffix.lower()], **options)
    return path


@contextmanager
def opened(file: Path, what: str = "image") -> Iterator[Image.Image]:
    """Open an image file; whatever goes wrong while it is decoded becomes a ValueError that names the file."""
    try:
        with Image.open(file) as image:
            yield image
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, struct.error ...
        raise ValueError(f"the {what} {file} cannot be read ({error}); remove or replace it") from error


def pixels_of(image: Image.Image) -> Tensor:
    """(3, H, W) uint8 of an RGB image."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def to_picture(pixels: Tensor) -> Image.Image:
    """The inverse of `pixels_of`."""
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def normalise(image: Tensor) -> Tensor:
    """uint8 images (n, 3, H, W) to mean 0 and standard deviation 1 over ImageNet.

    Channel by channel with plain numbers: a tensor of them would have to be copied to the device.
    """
    channels = (image.to(torch.get_default_dtype()) / 255).unbind(1)
    pairs = zip(channels, IMAGENET_MEAN, IMAGENET_STD, strict=True)
    return torch.stack([(channel - mean) / std for channel, mean, std in pairs], dim=1)


def voc_palette() -> np.ndarray:
    """(256, 3) uint8: Pascal VOC's colours, the bits of a label spread over the highest bits of red, green, blue."""
    label, bit = np.arange(256)[:, None], np.arange(8)
    channels = [((label >> (3 * bit + channel)) & 1) << (7 - bit) for channel in range(3)]
    return np.stack([channel.sum(1) for channel in channels], axis=1).astype(np.uint8)
