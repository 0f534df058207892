"""The drawn image set: the same bits in any company, balanced, and easy to tell apart."""

import hashlib

import pytest
import torch

from lockstep.recipes.shapes import _BACKGROUND, _FOREGROUND, _SHADE, SIZES, Shapes


def images(shapes: Shapes, indices: list[int] | range) -> torch.Tensor:
    return torch.stack([item["image"] for item in shapes.__getitems__(list(indices))])


def test_items_have_the_documented_form() -> None:
    item = Shapes("train")[13]
    assert item["image"].shape == (3, 32, 32) and item["image"].dtype == torch.uint8
    assert item["label"].shape == () and item["label"].dtype == torch.int64 and int(item["label"]) == 3
    assert Shapes("train", side=48)[0]["image"].shape == (3, 48, 48)
    assert {split: len(Shapes(split)) for split in SIZES} == {"train": 50_000, "val": 1_000, "test": 1_000}


@pytest.mark.parametrize("side", [16, 32, 45])
def test_an_image_does_not_depend_on_its_company(side: int) -> None:
    shapes = Shapes("train", side=side)
    order = [7, 49_999, 3, 3, 120, 41, 0, 33_333]
    together = images(shapes, order)
    for picture, i in zip(together, order, strict=True):
        assert torch.equal(picture, shapes[i]["image"])
    assert torch.equal(images(shapes, list(reversed(order))), together.flip(0))
    assert torch.equal(images(Shapes("train", size=50, side=side), [41]), images(shapes, [41]))


def test_the_pictures_are_the_ones_that_were_always_drawn() -> None:
    """A change of the drawing changes every run on the embedded data: it has to be meant."""
    digest = hashlib.sha256()
    for split in SIZES:
        digest.update(images(Shapes(split), range(100)).numpy().tobytes())
    assert digest.hexdigest()[:16] == "67ea8ddcfb8660ab"


def test_the_default_type_changes_nothing() -> None:
    before = images(Shapes("val"), range(20))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(images(Shapes("val"), range(20)), before)
    finally:
        torch.set_default_dtype(torch.float32)


def test_classes_are_balanced_and_named() -> None:
    shapes = Shapes("val")
    labels = torch.stack([item["label"] for item in shapes.__getitems__(range(len(shapes)))])
    assert labels.bincount().tolist() == [100] * 10
    assert len(set(shapes.names)) == 10


def test_images_and_splits_differ() -> None:
    seen = {picture.numpy().tobytes() for split in SIZES for picture in images(Shapes(split), range(400))}
    assert len(seen) == 1200


def test_classes_are_told_apart_by_the_nearest_mean_outline() -> None:
    """Without colours: the share of the picture that is shape, pixel by pixel, against the mean of each class."""

    def outlines(split: str, n: int) -> torch.Tensor:
        grey = images(Shapes(split), range(n)).float().mean(1)  # type: ignore[arg-type]
        low, high = grey.amin((1, 2), keepdim=True), grey.amax((1, 2), keepdim=True)
        return (grey - low) / (high - low)

    train, val = outlines("train", 2000), outlines("val", 500)
    means = torch.stack([train[k::10].mean(0) for k in range(10)])
    nearest = (val[:, None] - means).square().sum((2, 3)).argmin(1)
    assert (nearest == torch.arange(500) % 10).float().mean() > 0.65


def test_every_image_has_contrast_and_stays_inside() -> None:
    def luminance(colour: tuple[int, int, int]) -> float:
        return (0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]) / 255

    assert min(map(luminance, _FOREGROUND)) * (1 - _SHADE) - max(map(luminance, _BACKGROUND)) > 0.3
    pictures = images(Shapes("train"), range(2000)).float().mean(1)
    assert (pictures.amax((1, 2)) - pictures.amin((1, 2))).min() > 60
    border = torch.cat([pictures[:, 0], pictures[:, -1], pictures[:, :, 0], pictures[:, :, -1]], dim=1)
    touching = (border.amax(1) - pictures.amin((1, 2)) > 60).float().mean()
    assert touching < 0.02


def test_edges_are_smooth() -> None:
    disc = images(Shapes("train"), [0]).float().mean(1)
    assert len(disc.unique()) > 10


@pytest.mark.parametrize("index", [-1, 10, 10**9])
def test_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="0 to 9"):
        Shapes("train", size=10)[index]
    assert len(list(iter(Shapes("train", size=10)))) == 10  # type: ignore[call-overload]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="train, val, test"):
        Shapes("valid")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 8"):
        Shapes("train", side=4)
    assert Shapes("train").__getitems__([]) == []
