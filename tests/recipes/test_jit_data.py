"""The images of `jit`: written and read back, validation beside training, decoded images kept and mistrusted."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.recipes.images import FolderImages, Images, describe
from lockstep.recipes.jit import JiTRecipe
from lockstep.recipes.jit.data import CachedImages, cached, load
from lockstep.recipes.jit.recipe import JiTOptions
from lockstep.recipes.shapes import Shapes

SIDE = 16


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    said = JiTRecipe(JiTOptions(model="JiT-Nano/4", img_size=SIDE)).write_data(folder)
    there = f"640 train and 100 val images of 10 classes, {SIDE} pixels per side, in {folder}"
    assert said == f"{there}; use --data_path {folder}/train"
    return folder


def some(folder: Path, count: int = 6) -> FolderImages:
    """A folder of noisy pictures of two classes."""
    generator = np.random.default_rng(0)
    for i in range(count):
        file = folder / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(file)
    images = load(str(folder), "train", SIDE)
    assert isinstance(images, FolderImages)
    return images


def equal(a: Images, b: Images) -> bool:
    pairs = [(a[i], b[i]) for i in range(len(a))]
    return len(a) == len(b) and all(
        torch.equal(x["image"], y["image"]) and torch.equal(x["label"], y["label"]) for x, y in pairs
    )


def test_what_is_written_is_what_is_read(written: Path) -> None:
    for path in (written / "train", written):  # the folder of training images, or the one above
        train, val = load(str(path), "train", SIDE), load(str(path), "val", SIDE)
        assert train is not None and val is not None and load(str(path), "test", SIDE) is None
        assert (len(train), len(val)) == (640, 100)
        assert train.names == val.names == tuple(sorted(Shapes.names))
        assert describe(train) == f"image folder {written / 'train'}, 640 images of 10 classes"
    for split, images in (("train", train), ("val", val)):
        drawn = Shapes(split, side=SIDE)  # type: ignore[arg-type]
        assert isinstance(images, FolderImages)
        for i in range(0, len(images), 37):
            number = int(images.files[i][0].stem)
            assert torch.equal(images[i]["image"], drawn[number]["image"])
            assert images.names[int(images[i]["label"])] == drawn.names[number % 10]


def test_a_folder_called_train_without_others_beside_it_is_all_there_is(tmp_path: Path) -> None:
    some(tmp_path / "train")
    assert len(load(str(tmp_path / "train"), "train", SIDE) or []) == 6
    assert load(str(tmp_path / "train"), "val", SIDE) is None


def test_a_missing_folder_comes_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"train is missing; .*lockstep data jit {tmp_path}$"):
        load(str(tmp_path / "train"), "train", SIDE)
    with pytest.raises(ValueError, match=rf"lockstep data jit {tmp_path}/pets$"):
        load(str(tmp_path / "pets"), "train", SIDE)


def test_without_a_path_the_shapes_are_drawn(tmp_path: Path) -> None:
    assert isinstance(load(None, "train", SIDE, str(tmp_path)), Shapes)
    assert not any(tmp_path.iterdir()), "what is drawn need not be kept"


def test_kept_images_are_the_decoded_ones_and_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = some(tmp_path / "images")
    asked = []
    read = FolderImages.__getitem__
    monkeypatch.setattr(FolderImages, "__getitem__", lambda self, i: asked.append(i) or read(self, i))
    kept = load(str(tmp_path / "images"), "train", SIDE, str(tmp_path / "cache"))
    assert isinstance(kept, CachedImages) and kept.names == ("a", "b") and "decoded images in" in describe(kept)
    first = [kept[i] for i in range(6)]
    assert asked == list(range(6))
    again = load(str(tmp_path / "images"), "train", SIDE, str(tmp_path / "cache"))
    assert again is not None
    second = [again[i] for i in range(6)] + [kept[i] for i in range(6)]
    assert asked == list(range(6)), "nothing is decoded twice, here or in another process"
    for one, other in zip(first * 2, second, strict=True):
        assert torch.equal(one["image"], other["image"]) and torch.equal(one["label"], other["label"])
    assert equal(plain, again)
    second[0]["image"].zero_()
    assert again[0]["image"].any(), "an item is the caller's own"
    with pytest.raises(IndexError):
        again[6]


def test_black_images_are_kept_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "a" / "1.png")
    images = load(str(tmp_path), "train", SIDE)
    assert isinstance(images, FolderImages)
    kept = cached(images, tmp_path / ".cache")
    assert not kept._sums[0] and not kept[0]["image"].any() and kept._sums[0]


def test_damaged_entries_are_decoded_again(tmp_path: Path) -> None:
    plain = some(tmp_path / "images")
    kept = cached(plain, tmp_path / "cache")
    assert equal(plain, kept)
    (file,) = (tmp_path / "cache").iterdir()
    raw = bytearray(file.read_bytes())
    assert len(raw) == 6 * (4 + 3 * SIDE * SIDE)
    raw[6 * 4 + 100] ^= 1  # a pixel of the first
    raw[4] ^= 1  # the checksum of the second
    raw[-3 * SIDE * SIDE :] = bytes(3 * SIDE * SIDE)  # the last one lost its pixels
    file.write_bytes(raw)
    assert equal(plain, cached(plain, tmp_path / "cache"))
    file.write_bytes(raw[:100])  # cut short
    assert equal(plain, cached(plain, tmp_path / "cache"))


def test_changed_files_and_other_sides_make_another_cache(tmp_path: Path) -> None:
    plain = some(tmp_path / "images")
    assert equal(plain, cached(plain, tmp_path / "cache"))
    changed = plain.files[2][0]
    Image.new("RGB", (SIDE, SIDE), (9, 9, 9)).save(changed)
    os.utime(changed, ns=(1, 1))
    assert cached(plain, tmp_path / "cache")[2]["image"].eq(9).all()
    half = load(str(tmp_path / "images"), "train", SIDE // 2, str(tmp_path / "cache"))
    assert half is not None and half[0]["image"].shape == (3, SIDE // 2, SIDE // 2)
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_ranks_that_open_and_fill_a_cache_at_once_agree(tmp_path: Path) -> None:
    plain = some(tmp_path / "images", 20)

    def rank(_: int) -> bool:
        return equal(plain, cached(plain, tmp_path / "cache"))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(rank, range(8)))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    plain = some(tmp_path / "images")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache_images needs .* MB in .*file: .*choose another folder"):
        cached(plain, tmp_path / "file")


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    plain = some(tmp_path / "images")
    plain.files[1][0].write_bytes(b"no image")
    for images in (plain, cached(plain, tmp_path / "cache")):
        with pytest.raises(ValueError, match=r"cannot be read .*; remove or replace it"):
            images[1]
