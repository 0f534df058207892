"""Image files read and written, ImageNet's normalisation, Pascal VOC's colours."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..files import replacing
from .confusion import IGNORE
from .folders import files_below, special_kind

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of red, green and blue: what pretrained weights expect."""
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What files may hold, whatever their ending. Pillow knows more: for an EPS it would start Ghostscript."""
_WHITE_16 = 65535
_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262


def image_files(folder: Path) -> list[Path]:
    """Return the image files in a folder and below, sorted, without hidden ones."""
    return files_below([folder], ENDINGS)[folder]


def save_image(image: Image.Image, path: Path, **options: Any) -> Path:
    """Save in the format of the path's suffix, with the options of that format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        image.save(temporary, Image.registered_extensions()[path.suffix.lower()], **options)
    return path


@contextmanager
def opened(file: Path, what: str = "image") -> Iterator[Image.Image]:
    """Open an image file; whatever goes wrong while it is decoded becomes a ValueError that names the file."""
    if kind := special_kind(file):
        raise ValueError(f"the {what} {file} is {kind}, not a file; remove or replace it")
    try:
        with Image.open(file, formats=FORMATS) as image:
            yield image
    except Exception as error:  # Pillow's decoders raise many kinds: OSError, SyntaxError, struct.error ...
        unknown = isinstance(error, UnidentifiedImageError)
        reason = f"it is damaged, or none of {', '.join(FORMATS)}" if unknown else error
        raise ValueError(f"the {what} {file} cannot be read ({reason}); remove or replace it") from error


def read_rgb(file: Path, least_side: int = 0) -> Image.Image:
    """Return a picture with 8 bits each of red, green and blue, turned upright as its EXIF orientation says.

    Grey is scaled by the bit depth; palettes, 1-bit, CMYK and YCbCr pictures are converted; transparency is dropped.
    With `least_side`, a JPEG may be decoded at a fraction of its size, at least that.
    """
    with opened(file) as found:
        if least_side:
            found.draft(None, (least_side, least_side))
        white, mode = _white(found), found.mode
        image = ImageOps.exif_transpose(found)
        image.info.pop("transparency", None)  # of a palette or a colour: Pillow would warn that it is dropped
        if white is None and not _is_deep(mode):
            return image.convert("RGB")
    if white is None:
        raise ValueError(_unknown_white("image", file, mode))
    return Image.fromarray(_scaled(np.array(image), white)).convert("RGB")


def read_grey(file: Path, what: str) -> np.ndarray:
    """Return intensities (H, W) uint8 of a grey picture, scaled by the bit depth; of a palette, its indices."""
    with opened(file, what) as found:
        white, mode = _white(found), found.mode
        values = np.array(ImageOps.exif_transpose(found))
    if white is None and _is_deep(mode):
        raise ValueError(_unknown_white(what, file, mode))
    if white is None and mode not in ("L", "P"):
        raise ValueError(_not_one_number(what, file, mode))
    return values if white is None else _scaled(values, white)


def read_labels(file: Path, what: str, bilevel: bool = False) -> np.ndarray:
    """Return labels (H, W) uint8, as they are stored: of 2 to 16 bits grey, or the indices of a palette.

    The largest number of 8 and of 16 bits, 255 and 65535, is 255: no label. With `bilevel`, 1-bit files are allowed:
    black is 0, white 255.
    """
    with opened(file, what) as found:
        mode, step, is_16_bit = found.mode, _grey_step(found), _white(found) is not None
        upright = ImageOps.exif_transpose(found)
        values = np.array(upright.convert("L") if mode == "1" else upright)
    if is_16_bit:
        values = np.where(values == _WHITE_16, IGNORE, values)
        if values.max(initial=0) > IGNORE:
            raise ValueError(
                f"a {what} holds labels up to {IGNORE - 1}, or {IGNORE} or {_WHITE_16} for none, {file} holds "
                f"{values.max()}; renumber its labels"
            )
    elif mode not in ("L", "P") and not (bilevel and mode == "1"):
        raise ValueError(_not_one_number(what, file, mode))
    return values.astype(np.uint8) // np.uint8(step)


def _is_deep(mode: str) -> bool:
    """Return whether pixels are integers of more than 8 bits, or floats: Pillow would clip them to 0 … 255."""
    return mode == "F" or mode.startswith("I")


def _white(image: Image.Image) -> int | None:
    """Return what a grey image of more than 8 bits has for white; None for other images, or if no file says it."""
    if not image.mode.startswith("I"):
        return None
    if image.format != "TIFF":
        return _WHITE_16 if image.format in ("PNG", "PPM") else None  # also a PGM of fewer bits: Pillow scales it
    tags = image.tag_v2  # type: ignore[attr-defined]
    is_plain = image.mode.startswith("I;16") and tags.get(_TIFF_PHOTOMETRIC) == 1  # black is 0
    return (1 << tags[_TIFF_BITS][0]) - 1 if is_plain else None


def _scaled(values: np.ndarray, white: int) -> np.ndarray:
    """Return 0 … white as 0 … 255, rounded."""
    return ((values.astype(np.uint32) * 255 + white // 2) // white).astype(np.uint8)


def _grey_step(image: Image.Image) -> int:
    """Return by how much Pillow multiplies the values of a grey PNG of 2 or 4 bits; 1 for all other images."""
    tile = getattr(image, "tile", None) if image.format == "PNG" else None
    return {"L;2": 85, "L;4": 17}.get(tile[0].args, 1) if tile else 1


def _unknown_white(what: str, file: Path, mode: str) -> str:
    kind = "float" if mode == "F" else "signed, inverted or 32-bit integer"
    return f"the {what} {file} has {kind} pixels, which do not say what is white; save it with 8 or 16 bits per channel"


def _not_one_number(what: str, file: Path, mode: str) -> str:
    return f"a {what} has 8 or 16 bits per pixel, grey or palette, {file} has mode {mode}; convert it"


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


def with_labels(image: Tensor, labels: Tensor, names: Sequence[str], background: bool) -> tuple[Tensor, str]:
    """Return an image (3, H, W) uint8, half in the colours of its labels (H, W), and the names of their classes.

    Pixels without a label stay as they are, and without `background` so do those of class 0.
    """
    labels = labels.long().cpu()
    seen = (labels != IGNORE) & (background | (labels != 0))
    colours = torch.from_numpy(voc_palette())[labels].permute(2, 0, 1)
    mixed = torch.where(seen, (image.cpu().int() + colours.int()) // 2, image.cpu().int())
    return mixed.to(torch.uint8), ", ".join(names[k] for k in labels[seen].unique().tolist())
