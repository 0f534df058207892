"""Where the images of `vision` come from: files that `lockstep data` writes, real readers, and damage."""

import gzip
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.recipes.shapes import Shapes, _disc
from lockstep.recipes.vision import idx, masks
from lockstep.recipes.vision.data import Subset, held_out, inputs, load, native_side
from lockstep.recipes.vision.masks import ShapeMasks, covered
from lockstep.recipes.vision.recipe import VisionOptions, VisionRecipe


def written(folder: Path, **options: Any) -> Path:
    folder.mkdir()
    VisionRecipe(VisionOptions(**{"max_samples": 20, "img_size": 16, **options})).write_data(folder)
    return folder


def test_class_folders_hold_the_shapes_and_are_read_back(tmp_path: Path) -> None:
    folder = written(tmp_path / "d")
    assert native_side(str(folder)) == 16
    for split in ("train", "val", "test"):
        found, shapes = load(str(folder), split, 16, False), Shapes(split, side=16)
        assert len(found) == 20 and found.names == tuple(sorted(Shapes.names))
        for name in Shapes.names:
            assert len(list((folder / split / name).iterdir())) == 2
        for i in range(0, 20, 3):
            file, label = found.files[i]
            original = shapes[int(file.stem)]
            assert torch.equal(found[i]["image"], original["image"])
            assert found.names[int(found[i]["label"])] == found.names[label] == Shapes.names[int(original["label"])]


def test_masks_are_written_and_read_back(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", model="unet")
    for split in ("train", "val", "test"):
        found, shapes = load(str(folder), split, 16, True), ShapeMasks(split, 16)
        assert found.names == shapes.names and len(found) == 20
        for i in range(0, 20, 3):
            assert torch.equal(found[i]["image"], shapes[i]["image"]) and torch.equal(
                found[i]["mask"], shapes[i]["mask"]
            )


def test_a_drawn_mask_covers_its_shape_and_nothing_else() -> None:
    """Independent of the picture: a disc's mask from the disc's own equation."""
    shapes, data = Shapes("train", side=48), ShapeMasks("train", 48)
    assert data.names[1] == "disc"
    for i in range(0, 100, 10):
        mask = data[i]["mask"]
        assert set(mask.unique().tolist()) == {0, 1}
        index = torch.tensor([i])
        from lockstep.rng import Rng

        rng = Rng.of(1, torch.zeros_like(index), index)
        size = 0.6 + 0.16 * rng.uniform("size", 1, 1, dtype=torch.float32)
        inside = _disc(*shapes._local(rng, size))[0] <= 0
        assert (inside != mask.bool()).double().mean() < 0.002
    for i in range(20):
        assert set(data[i]["mask"].unique().tolist()) == {0, 1 + i % 10}


def test_covered_takes_pixels_at_least_half_of_the_shape() -> None:
    back, front = torch.tensor([10.0, 20, 80]), torch.tensor([250.0, 220, 50])
    share = torch.tensor([[0, 0.2, 0.45], [0.55, 1, 0.9], [0.0, 0.3, 0.7]])
    image = (back[:, None, None] + share * (front - back)[:, None, None]).round().to(torch.uint8)
    assert torch.equal(covered(image), share >= 0.5)


def write_idx(folder: Path, count: int = 12, name: str = "train", packed: bool = True, classes: int = 4) -> None:
    generator = np.random.default_rng(0)
    end = ".gz" if packed else ""
    folder.mkdir(exist_ok=True)
    images = generator.integers(0, 256, (count, 9, 9), dtype=np.uint8)
    header = struct.pack(">IIII", 0x00000803, count, 9, 9)
    labels = struct.pack(">II", 0x00000801, count) + bytes(i % classes for i in range(count))
    for kind, content in (("images-idx3", header + images.tobytes()), ("labels-idx1", labels)):
        (folder / f"{name}-{kind}-ubyte{end}").write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [True, False])
def test_idx_is_read_as_the_format_says(tmp_path: Path, packed: bool) -> None:
    write_idx(tmp_path, packed=packed)
    found = load(str(tmp_path), "train", 9, False, val_fraction=0.0)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 9, 9), dtype=np.uint8)
    assert all(np.array_equal(found[i]["image"][1].numpy(), pixels[i]) for i in range(12))
    assert [int(found[i]["label"]) for i in range(12)] == [i % 4 for i in range(12)] and len(found.names) == 4
    assert load(str(tmp_path), "test", 9, False) is None and load(str(tmp_path), "val", 9, False, 0.0) is None
    assert load(str(tmp_path), "train", 24, False)[0]["image"].shape == (3, 24, 24) and native_side(str(tmp_path)) == 9
    with pytest.raises(IndexError):
        found[12]


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    whole = gzip.decompress(file.read_bytes())

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            load(str(tmp_path), "train", 9, False)

    file.write_bytes(gzip.compress(b"\0\0\x0d\x03" + whole[4:]))
    refused(r"begins with 00000803, .*train-images.* with 00000d03")
    file.write_bytes(gzip.compress(whole[:-5]))
    refused(r"should hold 12 × 9 × 9 bytes after its header, it has 967")
    file.write_bytes(gzip.compress(whole[:9]))
    refused("should hold")
    file.write_bytes(gzip.compress(b""))
    refused("with nothing")
    file.write_bytes(gzip.compress(whole)[:-40])
    refused("cannot be read")
    file.write_bytes(whole)
    refused("cannot be read")
    file.write_bytes(gzip.compress(whole))
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(struct.pack(">II", 0x801, 11) + bytes(11)))
    refused(r"12 images and .* 11 labels")
    labels.unlink()
    refused(r"lack train-labels-idx1-ubyte")
    assert idx.read(file, 3).shape == (12, 9, 9)


def test_test_labels_beyond_the_training_classes_are_refused(tmp_path: Path) -> None:
    write_idx(tmp_path)
    write_idx(tmp_path, name="t10k")
    assert len(load(str(tmp_path), "test", 9, False)) == 12
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(struct.pack(">II", 0x801, 12) + bytes([7] * 12)))
    with pytest.raises(ValueError, match="holds the label 7, training has 4 classes"):
        load(str(tmp_path), "test", 9, False)


def test_fashion_has_its_names(tmp_path: Path) -> None:
    write_idx(tmp_path / "my-fashion-set", classes=10)
    assert load(str(tmp_path / "my-fashion-set"), "train", 9, False).names == idx.FASHION
    with pytest.raises(ValueError, match="apt-get install dataset-fashion-mnist"):
        load("/nowhere/fashion-mnist", "train", 28, False)


def test_a_validation_part_is_held_out_once_and_for_all() -> None:
    for count, fraction in ((100, 0.1), (7, 0.5), (2, 0.01), (1000, 0.999)):
        val, rest = held_out(count, fraction, True), held_out(count, fraction, False)
        assert sorted(val + rest) == list(range(count)) and val and rest
    val = held_out(10_000, 0.1, True)
    assert len(val) == 1000 and val == held_out(10_000, 0.1, True)
    assert max(Counter(i // 1000 for i in val).values()) < 150  # spread over a set that is sorted by class


def test_data_without_val_lose_some_training_images_to_it(tmp_path: Path) -> None:
    for name in ("train", "t10k"):
        write_idx(tmp_path / "d", 20, name)
    train, val, test = (load(str(tmp_path / "d"), split, 9, False, 0.2) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (16, 4, 20) and set(train.indices) | set(val.indices) == set(range(20))
    folder = str(written(tmp_path / "e"))
    assert not isinstance(load(folder, "train", 16, False, 0.2), Subset)  # it has a val folder


@pytest.mark.parametrize("limit", [50, 64, 100])
def test_a_limit_takes_some_of_every_class(tmp_path: Path, limit: int) -> None:
    """Whether classes come in turn, as in the shapes, or one after the other, as in folders."""
    in_turn = load(None, "val", 16, False, limit=limit)
    by_name = load(str(written(tmp_path / "d", max_samples=200)), "train", 16, False, limit=limit)
    for found in (in_turn, by_name):
        counts = Counter(int(item["label"]) for item in found.__getitems__(range(limit)))
        assert len(found) == limit == counts.total() and len(counts) == 10 and max(counts.values()) < limit / 4
        assert found.indices == sorted(set(found.indices))


def pair(folder: Path, name: str, values: np.ndarray) -> None:
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.stack([values] * 3, -1).astype(np.uint8)).save(folder / "images" / f"{name}.jpg", quality=95)
    Image.fromarray(values.astype(np.uint8)).save(folder / "masks" / f"{name}.png")


def test_masks_of_0_and_255_are_background_and_foreground(tmp_path: Path) -> None:
    values = np.zeros((20, 30), dtype=np.uint8)
    values[:10] = 255
    pair(tmp_path, "a", values)
    found = load(str(tmp_path), "train", 10, True, val_fraction=0.0)
    assert found.names == ("background", "foreground")
    assert found[0]["mask"][:5].eq(1).all() and found[0]["mask"][5:].eq(0).all()
    values[0] = 3
    pair(tmp_path, "b", values)
    masks._values.cache_clear()
    found = load(str(tmp_path), "train", 10, True, val_fraction=0.0)
    assert found.names == ("class 0", "class 1", "class 2", "class 3") and (found[0]["mask"][:5] == 255).all()


def test_bad_mask_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which do not exist"):
        load(str(tmp_path), "train", 10, True)
    values = np.arange(64).reshape(8, 8) % 3
    pair(tmp_path, "a", values)
    (tmp_path / "classes.txt").write_text("sky\nsea\n")
    with pytest.raises(ValueError, match=r"a.png holds the class 2, there are 2"):
        load(str(tmp_path), "train", 8, True, 0.0)[0]
    (tmp_path / "classes.txt").write_text("sky\n")
    with pytest.raises(ValueError, match="2 to 255 classes, one per line, not 1"):
        load(str(tmp_path), "train", 8, True)
    (tmp_path / "classes.txt").unlink()
    Image.new("RGB", (8, 8)).save(tmp_path / "masks" / "a.png")
    with pytest.raises(ValueError, match=r"8 or 16 bits per pixel.*mode RGB"):
        load(str(tmp_path), "train", 8, True)
    (tmp_path / "masks" / "a.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"mask .*a.png cannot be read"):
        load(str(tmp_path), "train", 8, True)
    (tmp_path / "masks" / "a.png").unlink()
    with pytest.raises(ValueError, match=r"no mask of the same name, such as a.jpg"):
        load(str(tmp_path), "train", 8, True)
    pair(tmp_path, "a", np.zeros((8, 8)))
    masks._values.cache_clear()
    with pytest.raises(ValueError, match="no class but 0"):
        load(str(tmp_path), "train", 8, True)


def test_inputs_are_a_file_a_folder_or_idx_images_in_sorted_order(tmp_path: Path) -> None:
    folder = written(tmp_path / "d") / "test"
    found = inputs(folder, 16, False)
    assert len(found) == 20 and found.names == sorted(found.names) and found.names[0] == "bars/00009.png"
    one = inputs(folder / found.names[3], 16, False)
    assert len(one) == 1 and torch.equal(one[0]["image"], found[3]["image"])
    write_idx(tmp_path / "e", name="t10k")
    packed = tmp_path / "e" / "t10k-images-idx3-ubyte.gz"
    assert inputs(packed, 16, False).names[7] == "t10k-images-idx3-ubyte.gz[7]"
    pairs = written(tmp_path / "f", model="unet") / "test"
    assert inputs(pairs, 16, True).names[:2] == ["00000.png", "00001.png"] and len(inputs(pairs, 16, True)) == 20
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images"):
        inputs(tmp_path / "empty", 16, False)


def test_the_side_is_that_of_the_first_image_and_224_at_most(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (50, 40)).save(tmp_path / "a" / "1.png")
    assert native_side(str(tmp_path)) == 40 and native_side(None) == 32
    Image.new("RGB", (500, 400)).save(tmp_path / "a" / "0.png")
    assert native_side(str(tmp_path)) == 224
    (tmp_path / "a" / "0.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"0.png cannot be read"):
        native_side(str(tmp_path))
