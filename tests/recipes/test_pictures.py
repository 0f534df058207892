"""Pictures as users have them: any bit depth and mode, links, special files, names that are not UTF-8."""

import os
import socket
import struct
import subprocess
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import environment
from torch import Tensor

from lockstep import Augments, Rng, registry
from lockstep.files import printable
from lockstep.recipes import images
from lockstep.recipes.folders import files_below
from lockstep.recipes.jit.data import load as load_jit
from lockstep.recipes.pixels import image_files, read_labels, read_rgb, with_labels
from lockstep.recipes.scribble import files as scribble
from lockstep.recipes.vision import masks

SIDE = 8
GREY = np.linspace(0, 255, SIDE * SIDE).round().astype(np.uint8).reshape(SIDE, SIDE)
READERS: dict[str, Callable[[Path], Tensor]] = {
    "dit, jit and vision": lambda file: images.FolderImages([(file, 0)], ("a",), SIDE, "")[0]["image"],
    "vision with masks": lambda file: masks.read_image(file, SIDE),
    "scribble": scribble.read_image,
}


def png(path: Path, values: np.ndarray, bits: int) -> Path:
    """A grey PNG of that many bits, which Pillow cannot write."""
    rows = b"".join(b"\0" + (np.packbits(np.unpackbits(row[:, None], axis=1)[:, -bits:])).tobytes() for row in values)
    head = struct.pack(">IIBBBBB", values.shape[1], len(values), bits, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = (struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path


def saved(path: Path, values: np.ndarray, kind: str = "PNG", **options: object) -> Path:
    Image.fromarray(values).save(path, kind, **options)
    return path


@pytest.mark.parametrize("reader", READERS)
def test_deep_grey_is_scaled_by_its_bit_depth(tmp_path: Path, reader: str) -> None:
    expected = torch.from_numpy(GREY).expand(3, SIDE, SIDE)
    deep = GREY.astype(np.uint16) * 257
    found = {
        "16-bit PNG": saved(tmp_path / "a.png", deep),
        "16-bit TIFF": saved(tmp_path / "b.png", deep, "TIFF"),
        "big-endian TIFF": saved(tmp_path / "c.png", deep.astype(">u2"), "TIFF"),
        "16-bit PGM": saved(tmp_path / "d.png", deep, "PPM"),
    }
    (tmp_path / "e.png").write_bytes(b"P5 8 8 1020\n" + (4 * GREY.astype(int)).astype(">u2").tobytes())
    found["10-bit PGM"] = tmp_path / "e.png"
    for name, file in found.items():
        assert torch.equal(READERS[reader](file), expected), name


@pytest.mark.parametrize("reader", READERS)
def test_pixels_without_a_white_are_refused_by_name(tmp_path: Path, reader: str) -> None:
    saved(tmp_path / "int.png", GREY.astype(np.int32) * 65537, "TIFF")
    saved(tmp_path / "float.png", GREY.astype(np.float32) / 255, "TIFF")
    for name, kind in (("int", "32-bit integer"), ("float", "float")):
        with pytest.raises(ValueError, match=rf"{name}.png has .*{kind} pixels.*; save it with 8 or 16 bits"):
            READERS[reader](tmp_path / f"{name}.png")


@pytest.mark.parametrize("reader", READERS)
def test_every_mode_gives_the_colours_that_a_viewer_shows(tmp_path: Path, reader: str) -> None:
    colour = Image.new("RGB", (SIDE, SIDE), (200, 40, 80))
    for mode in ("RGB", "RGBA", "P", "CMYK", "YCbCr"):
        kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
        made = colour.quantize(4) if mode == "P" else colour.convert(mode)
        made.save(tmp_path / "a.png", kind)
        middle = READERS[reader](tmp_path / "a.png")[:, 4, 4]
        assert (middle.int() - torch.tensor([200, 40, 80])).abs().max() <= 2, mode
    colour.save(tmp_path / "a.jpg", quality=95)  # stored as YCbCr
    assert (READERS[reader](tmp_path / "a.jpg")[:, 4, 4].int() - torch.tensor([200, 40, 80])).abs().max() <= 4
    for mode in ("1", "L", "LA"):
        Image.new("L", (SIDE, SIDE), 255).convert(mode).save(tmp_path / "a.png")
        assert READERS[reader](tmp_path / "a.png").eq(255).all(), mode


@pytest.mark.parametrize("reader", READERS)
def test_pictures_are_turned_upright_by_their_exif_orientation(tmp_path: Path, reader: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    turned = saved(tmp_path / "turned.png", np.rot90(GREY, 2).copy(), exif=exif)
    assert torch.equal(READERS[reader](turned), torch.from_numpy(GREY).expand(3, SIDE, SIDE))


@pytest.mark.parametrize("reader", READERS)
def test_eps_in_disguise_starts_no_program(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    for name in ("gs", "gswin32c", "gswin64c"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {started}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    eps = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "a.png").write_text(eps)
    with pytest.raises(ValueError, match=r"a.png cannot be read \(it is damaged, or none of PNG, JPEG.*remove"):
        READERS[reader](tmp_path / "a.png")
    assert not started.exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reader", READERS)
def test_special_files_are_refused_without_waiting(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "broken.png").symlink_to("nowhere")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.png"))
        for name, kind in (("fifo", "FIFO"), ("broken", "broken link"), ("device", "device"), ("socket", "socket")):
            with pytest.raises(ValueError, match=rf"{name}.png is a {kind}, not a file; remove"):
                READERS[reader](tmp_path / f"{name}.png")
            folder = tmp_path / f"only_{name}"
            folder.mkdir()
            (tmp_path / f"{name}.png").rename(folder / "a.png")
            with pytest.raises(ValueError, match=rf"a.png is a {kind}, not a file"):
                image_files(folder)


def test_links_are_followed_and_each_folder_is_walked_once(tmp_path: Path) -> None:
    for name in ("data/cat/deep", "data/dog", "outside"):
        (tmp_path / name).mkdir(parents=True)
        saved(tmp_path / name / "a.png", GREY)
    data = tmp_path / "data"
    saved(data / "cat" / "b.png", GREY)
    (data / "all").symlink_to(data)  # loops
    (data / "cat" / "up").symlink_to("..")
    (data / "cat" / "self").symlink_to("self")
    (data / "cat" / "again").symlink_to("deep")  # repeated
    (data / "cat" / "a_dog").symlink_to(data / "dog")
    (data / "dog" / "x").symlink_to(tmp_path / "outside")
    (data / "dog" / "y").symlink_to(tmp_path / "outside")
    expected = ["cat/b.png", "cat/deep/a.png", "dog/a.png", "dog/x/a.png"]
    assert [file.relative_to(data).as_posix() for file in image_files(data)] == expected
    found = images.load(str(data), "train", SIDE)
    assert found is not None and found.names == ("cat", "dog")
    assert isinstance(found, images.FolderImages)
    assert [(file.relative_to(data).as_posix(), label) for file, label in found.files] == [
        (name, int(name.startswith("dog"))) for name in expected
    ]
    (data / "kitten").symlink_to("cat")
    with pytest.raises(ValueError, match=r"kitten holds no images .* or is a link to the images of another class"):
        images.load(str(data), "train", SIDE)


def test_a_folder_of_a_million_files_is_listed_without_a_stat_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(50):
        (tmp_path / f"{i}.png").touch()
    calls: list[Path] = []
    plain = Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **options: calls.append(self) or plain(self, **options))
    assert len(files_below([tmp_path], (".png",))[tmp_path]) == 50
    assert not [path for path in calls if path.suffix == ".png"]


def test_label_maps_keep_their_numbers(tmp_path: Path) -> None:
    classes = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], dtype=np.uint8)
    palette = Image.fromarray(classes)
    palette.putpalette(bytes(range(12)))
    palette.save(tmp_path / "palette.png")
    cases = {
        "8-bit": saved(tmp_path / "8.png", classes),
        "16-bit": saved(tmp_path / "16.png", classes.astype(np.uint16)),
        "palette": tmp_path / "palette.png",
        "4-bit": png(tmp_path / "4.png", classes, 4),
        "2-bit": png(tmp_path / "2.png", classes, 2),
    }
    for name, file in cases.items():
        assert np.array_equal(read_labels(file, "mask"), classes), name
        assert np.array_equal(masks.read_mask(file), classes), name
        assert np.array_equal(scribble.read_map(file, 4).numpy(), classes), name
    none = saved(tmp_path / "none.png", np.array([[0, 7, 255, 65535]], dtype=np.uint16))
    assert read_labels(none, "mask").tolist() == [[0, 7, 255, 255]]
    many = saved(tmp_path / "many.png", np.array([[0, 1000]], dtype=np.uint16))
    with pytest.raises(ValueError, match=r"labels up to 254, .*many.png holds 1000; renumber"):
        masks.read_mask(many)
    with pytest.raises(ValueError, match=r"8 or 16 bits per pixel.*i.png has mode I; convert it"):
        masks.read_mask(saved(tmp_path / "i.png", classes.astype(np.int32), "TIFF"))


def test_distance_maps_are_intensities(tmp_path: Path) -> None:
    file = saved(tmp_path / "near.png", GREY.astype(np.uint16) * 257)
    assert np.array_equal(scribble.read_distances(file).numpy(), GREY)


def test_a_png_with_a_palette_and_transparency_is_read(tmp_path: Path) -> None:
    image = Image.new("P", (SIDE, SIDE), 1)
    image.putpalette([0, 0, 0, 200, 40, 80])
    image.save(tmp_path / "a.png", transparency=b"\x00\x80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_rgb(tmp_path / "a.png").getpixel((3, 3)) == (200, 40, 80)


NAME = os.fsdecode(b"caf\xe9")
"""Latin-1, as on many an old disk: not UTF-8."""


def folder_with_odd_names(root: Path) -> Path:
    for split in ("train", "val"):
        for name in (NAME, "other"):
            (root / NAME / split / name).mkdir(parents=True)
            for i in range(4):
                saved(root / NAME / split / name / f"{NAME}{i}.png", GREY)
    return root / NAME


def test_names_that_are_not_utf8_work_in_a_run(tmp_path: Path) -> None:
    folder, out = folder_with_odd_names(tmp_path), tmp_path / "run"
    flags = ["--img_size", "8", "--batch_size", "4", "--n_steps", "2", "--eval_every", "1", "--device", "cpu"]
    train = ["lockstep", "train", "vision", "--data_path", str(folder), *flags, "--out", str(out)]
    done = subprocess.run(train, env=environment(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"caf\\xe9" in done.stdout
    predict = ["lockstep", "predict", str(out), str(folder / "val" / NAME), "--device", "cpu"]
    done = subprocess.run([*predict, "--out", str(out / NAME)], env=environment(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert bytes(out) + b"/caf\xe9/predictions.csv" in done.stdout
    table = (out / NAME / "predictions.csv").read_bytes()
    assert b"caf\xe93.png" in table


def test_names_that_are_not_utf8_are_cached_listed_and_named(tmp_path: Path) -> None:
    folder = folder_with_odd_names(tmp_path)
    found = load_jit(str(folder), "train", SIDE, cache=str(tmp_path / "cache"))
    assert found is not None and found.names == ("caf\\xe9", "other")
    assert torch.equal(found[0]["image"], torch.from_numpy(GREY).expand(3, SIDE, SIDE))
    broken = folder / f"{NAME}.png"
    broken.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read") as error:
        read_rgb(broken)
    assert "caf\\xe9.png cannot be read" in printable(str(error.value))


@pytest.mark.parametrize("recipe", ["dit", "jit", "vision", "vision unet", "scribble"])
def test_a_training_sample_is_drawn_with_its_label(recipe: str) -> None:
    name, *model = recipe.split()
    found = registry.find(name)
    made = found(found.Options(model=model[0]) if model else None)
    item = made.dataset("train")[5]
    if isinstance(made, Augments):
        item = made.augment(item, Rng.of(0, torch.zeros(1, dtype=torch.long), torch.tensor([5])))
    image, label = made.picture_of(item)
    assert image.dtype == torch.uint8 and image.shape == item["image"].shape
    names = made.dataset("train").names if name in ("dit", "jit") else made.names
    assert label and set(label.split(", ")) <= set(names)
    assert torch.equal(image, item["image"]) == (name not in ("scribble",) and not model)


def test_labels_are_drawn_where_there_are_some() -> None:
    image, labels = torch.full((3, 2, 2), 100, dtype=torch.uint8), torch.tensor([[0, 1], [255, 1]])
    tinted, text = with_labels(image, labels, ("ground", "plane"), background=False)
    assert text == "plane" and tinted[:, 0, 1].tolist() == [(100 + 128) // 2, 50, 50]
    assert (tinted[:, :, 0] == 100).all()
    tinted, text = with_labels(image, labels, ("ground", "plane"), background=True)
    assert text == "ground, plane" and tinted[:, 0, 0].tolist() == [50, 50, 50] and (tinted[:, 1, 0] == 100).all()
