"""Where the images of `dit` come from: the shapes, CIFAR-10's binary files, folders; and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.recipes.images import describe, load
from lockstep.recipes.shapes import Shapes


def write_cifar(folder: Path, per_file: int = 3) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    written = {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        records = generator.integers(0, 256, (per_file, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
        written[name] = records
    return written


def write_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 20)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_without_a_path_the_shapes_are_drawn() -> None:
    images = load(None, "train", 24)
    assert isinstance(images, Shapes) and images[0]["image"].shape == (3, 24, 24)
    assert describe(images) == "embedded shapes, 50,000 images of 10 classes"


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_cifar_is_read_record_by_record(tmp_path: Path, inner: str) -> None:
    written = write_cifar(tmp_path / inner)
    train, val, test = (load(str(tmp_path), split, 32) for split in ("train", "val", "test"))  # type: ignore[arg-type]
    assert train is not None and val is not None and test is not None
    assert (len(train), len(val), len(test)) == (15, 3, 3)
    for i in range(15):
        record = written[f"data_batch_{i // 3 + 1}"][i % 3]
        item = train[i]
        assert int(item["label"]) == record[0] and item["label"].dtype == torch.int64
        assert np.array_equal(item["image"].numpy(), record[1:].reshape(3, 32, 32))
    for images in (val, test):
        assert np.array_equal(images[2]["image"].numpy().ravel(), written["test_batch"][2, 1:])
    assert describe(train).startswith("CIFAR-10 binary") and describe(train).endswith(", 15 images of 10 classes")
    with pytest.raises(IndexError):
        train[15]


def test_cifar_of_the_wrong_form_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    with pytest.raises(ValueError, match="32 pixels per side, img_size is 64"):
        load(str(tmp_path), "train", 64)
    file = tmp_path / "data_batch_2.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"multiple of 3073 bytes, .*data_batch_2.bin has 9218"):
        load(str(tmp_path), "train", 32)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="has 0"):
        load(str(tmp_path), "train", 32)
    file.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(ValueError, match=r"labels are 0 to 9, .* holds 10"):
        load(str(tmp_path), "train", 32)
    file.unlink()
    with pytest.raises(ValueError, match=r"lacks data_batch_2.bin"):
        load(str(tmp_path), "train", 32)
    assert load(str(tmp_path), "test", 32) is not None


def test_a_folder_of_classes_is_all_train(tmp_path: Path) -> None:
    write_image(tmp_path / "blue" / "deep" / "b.png", (0, 0, 255))
    write_image(tmp_path / "blue" / "a.JPG", (0, 0, 250))
    write_image(tmp_path / "aqua" / "c.bmp", (0, 255, 255))
    write_image(tmp_path / "aqua" / ".hidden.png", (1, 1, 1))
    (tmp_path / "aqua" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    images = load(str(tmp_path), "train", 8)
    assert images is not None and len(images) == 3 and images.names == ("aqua", "blue")
    assert [int(images[i]["label"]) for i in range(3)] == [0, 1, 1]
    assert images[0]["image"].dtype == torch.uint8 and images[0]["image"].shape == (3, 8, 8)
    assert images[0]["image"][:, 4, 4].tolist() == [0, 255, 255]
    assert load(str(tmp_path), "val", 8) is None and load(str(tmp_path), "test", 8) is None
    assert describe(images) == f"image folder {tmp_path}, 3 images of 2 classes"
    with pytest.raises(IndexError):
        images[3]


def test_split_folders_share_the_numbering_of_train(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_image(tmp_path / "train" / name / "1.png", (9, 9, 9))
    write_image(tmp_path / "val" / "c" / "1.png", (9, 9, 9))
    val = load(str(tmp_path), "val", 8)
    assert val is not None and len(val) == 1 and int(val[0]["label"]) == 2 and val.names == ("a", "b", "c")
    assert load(str(tmp_path), "test", 8) is None
    write_image(tmp_path / "test" / "d" / "1.png", (9, 9, 9))
    with pytest.raises(ValueError, match="classes that train does not have: d"):
        load(str(tmp_path), "test", 8)


def test_the_middle_square_is_taken(tmp_path: Path) -> None:
    wide = Image.new("RGB", (60, 20), (255, 0, 0))
    wide.paste((0, 255, 0), (20, 0, 40, 20))
    (tmp_path / "x").mkdir()
    wide.save(tmp_path / "x" / "wide.png")
    wide.rotate(90, expand=True).save(tmp_path / "x" / "zhigh.png")
    images = load(str(tmp_path), "train", 10)
    assert images is not None
    for i in range(2):
        assert (images[i]["image"] == torch.tensor([0, 255, 0], dtype=torch.uint8)[:, None, None]).all()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_other_colour_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    (tmp_path / "x").mkdir()
    ending = "jpg" if mode == "CMYK" else "png"
    Image.new("RGB", (40, 30), (200, 200, 200)).convert(mode).save(tmp_path / "x" / f"1.{ending}")
    images = load(str(tmp_path), "train", 8)
    assert images is not None
    assert images[0]["image"].shape == (3, 8, 8) and (images[0]["image"].int() - 200).abs().max() < 5


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is missing"):
        load(str(tmp_path / "missing"), "train", 8)
    with pytest.raises(ValueError, match="no class folders"):
        load(str(tmp_path), "train", 8)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"a holds no images"):
        load(str(tmp_path), "train", 8)
    write_image(tmp_path / "a" / "1.png", (0, 0, 0))
    write_image(tmp_path / "loose.png", (0, 0, 0))
    with pytest.raises(ValueError, match=r"loose.png is in none"):
        load(str(tmp_path), "train", 8)
    with pytest.raises(ValueError, match="is a file"):
        load(str(tmp_path / "loose.png"), "train", 8)
    write_image(tmp_path / "other" / "test" / "a" / "1.png", (0, 0, 0))
    with pytest.raises(ValueError, match="has test, but no train"):
        load(str(tmp_path / "other"), "train", 8)


@pytest.mark.parametrize("ending", ["png", "jpg", "bmp", "webp"])
def test_a_damaged_image_is_named(tmp_path: Path, ending: str) -> None:
    whole, half = tmp_path / "a" / f"1.{ending}", tmp_path / "a" / f"2.{ending}"
    whole.parent.mkdir()
    Image.effect_noise((64, 64), 80).convert("RGB").save(whole)
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (tmp_path / "a" / f"3.{ending}").write_text("no image at all")
    images = load(str(tmp_path), "train", 8)
    assert images is not None and images[0]["image"].shape == (3, 8, 8)
    for i in (1, 2):
        with pytest.raises(ValueError, match=rf"{i + 1}.{ending} cannot be read"):
            images[i]
