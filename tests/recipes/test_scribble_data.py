"""Where the scenes of `scribble` come from: drawn ones, the Pascal-VOC layout, what is refused; and augmentation."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lockstep.recipes.pixels import voc_palette
from lockstep.recipes.scribble import data, files, scenes
from lockstep.recipes.scribble.augment import Augmentation, _blur, augment
from lockstep.rng import Rng

SIDE = 48
PLAIN = Augmentation(crop=SIDE, scale=(1.0, 1.0), rotate=0.0, flip=False, blur=0.0)


def key(i: int, epoch: int = 0) -> Rng:
    return Rng.of(3, torch.tensor([epoch]), torch.tensor([i]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small written set; tests that damage it copy it first."""
    sizes, scenes.SIZES = dict(scenes.SIZES), scenes.SIZES
    scenes.SIZES.update(train=6, val=3, test=2)
    try:
        root = tmp_path_factory.mktemp("voc")
        assert "6 train, 3 val, 2 test" in data.write(root, SIDE)
    finally:
        scenes.SIZES.update(sizes)
    return root


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_scene_comes_from_its_index_alone() -> None:
    drawn = scenes.Scenes("train", SIDE)
    alone, again = drawn[7], scenes.Scenes("train", SIDE)[7]
    torch.set_default_dtype(torch.float64)
    in_float64 = scenes.Scenes("train", SIDE)[7]
    torch.set_default_dtype(torch.float32)
    other, val = drawn[8], scenes.Scenes("val", SIDE)[7]
    for name, tensor in alone.items():
        assert tensor.dtype == torch.uint8
        assert torch.equal(tensor, again[name]) and torch.equal(tensor, in_float64[name])
    assert not any(torch.equal(alone["image"], x["image"]) for x in (other, val))
    with pytest.raises(IndexError):
        drawn[len(drawn)]


def test_a_scene_is_drawn_once_by_all_forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = scenes.Scenes("train", SIDE)
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        _ = drawn[3], drawn[4]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    fresh, copied = scenes.Scenes("train", SIDE), pickle.loads(pickle.dumps(drawn))
    expected = fresh[3], fresh[4]
    assert copied[3]["image"].equal(expected[0]["image"])
    monkeypatch.setattr(scenes, "_draw", None)
    for i, item in zip((3, 4), expected, strict=True):
        assert {name: t.tolist() for name, t in drawn[i].items()} == {name: t.tolist() for name, t in item.items()}
    drawn[3]["image"].zero_()
    assert drawn[3]["image"].equal(expected[0]["image"]), "an item is a copy"
    with pytest.raises(TypeError):
        drawn[5]


def test_scenes_that_would_take_too_much_memory_are_drawn_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scenes.Scenes("train", SIDE)[0]["image"]
    monkeypatch.setattr(scenes, "_MOST_MEMORY", 1 << 20)
    drawn = scenes.Scenes("train", SIDE)
    assert drawn[0]["image"].equal(expected) and drawn[0]["image"].equal(expected)


def test_scenes_are_labelled_as_the_paper_s_are() -> None:
    drawn = scenes.Scenes("train", 96)
    right, all_pseudo, found, shapes = 0, 0, 0, 0
    for i in range(24):
        item = drawn[i]
        label, scribble, pseudo = (item[name] for name in ("label", "scribble", "pseudo"))
        assert sorted(label.shape) == [72, 96] and item["image"].shape == (3, *label.shape)
        on = scribble != 255
        assert torch.equal(scribble[on], label[on]), "a scribble is never wrong"
        assert 0.005 < on.float().mean() < 0.15
        sure = pseudo != 255
        right, all_pseudo = right + int((pseudo == label)[sure].sum()), all_pseudo + int(sure.sum())
        there = set(label.unique().tolist()) - {0}
        shapes, found = shapes + len(there), found + len(there & set(scribble.unique().tolist()))
        assert (item["near_scribble"][on] == 255).all() and (item["near_scribble"][~on] < 255).all()
    assert 0.8 < right / all_pseudo < 0.97, "pseudo labels are about right, and not quite"
    assert found > 0.8 * shapes


def test_nearness_is_the_euclidean_distance() -> None:
    generator = np.random.default_rng(0)
    marked = torch.from_numpy(generator.random((23, 31)) < 0.01)
    assert marked.any()
    places = marked.nonzero().double()
    grid = torch.stack(torch.meshgrid(torch.arange(23), torch.arange(31), indexing="ij"), -1).double()
    distance = (grid[:, :, None] - places).norm(dim=-1).amin(-1)
    expected = (255 * (1 - distance / 7).clamp(min=0) + 0.5).to(torch.uint8)
    assert (scenes.nearness(marked, 7).int() - expected.int()).abs().max() <= 1  # rounding of a square root
    assert not scenes.nearness(torch.zeros(9, 9, dtype=torch.bool), 3).any()


def test_the_palette_is_pascal_s() -> None:
    colours = voc_palette()
    known = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 3: (128, 128, 0), 4: (0, 0, 128), 8: (64, 0, 0),
             15: (192, 128, 128), 20: (0, 64, 128), 255: (224, 224, 192)}  # fmt: skip
    for label, colour in known.items():
        assert tuple(colours[label]) == colour
    assert len({tuple(c) for c in colours}) == 256


def test_what_was_written_is_read_back(folder: Path) -> None:
    for split, count in (("train", 6), ("val", 3), ("test", 2)):
        source, drawn = data.VocFolder(folder, split, 21), scenes.Scenes(split, SIDE)  # type: ignore[arg-type]
        assert len(source) == count
        for i in range(count):
            item, scene = source[i], drawn[i]
            assert item.keys() == ({"image", *data.TRAINING} if split == "train" else {"image", "label"})
            for name in item.keys() - {"image"}:
                assert torch.equal(item[name], scene[name])
            assert (item["image"].float() - scene["image"].float()).abs().mean() < 4, "but for JPEG"
    with pytest.raises(IndexError):
        source[2]
    assert Image.open(folder / "PseudoLabels" / "train_00000.png").mode == "P"
    assert Image.open(folder / "ScribbleDistance" / "train_00000.png").mode == "L"
    assert data.class_names(str(folder), 7) == (*scenes.NAMES, "class6")


def test_lists_of_other_forms_are_read(copy: Path) -> None:
    lists = copy / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (copy / "val.txt").unlink()
    (lists / "val.txt").write_text("/JPEGImages/val_00001.jpg /SegmentationClassAug/val_00001.png\n\nval_00000\n")
    assert data.VocFolder(copy, "val", 21).names == ["val_00001", "val_00000"]
    (copy / "test.txt").unlink()
    assert data.list_file(copy, "test") is None


def test_missing_files_are_listed_before_anything_is_read(copy: Path) -> None:
    (copy / "Scribbles" / "train_00002.png").unlink()
    (copy / "JPEGImages" / "train_00004.jpg").unlink()
    (copy / "PseudoDistance" / "train_00001.png").unlink()
    with pytest.raises(ValueError, match="lacks 3 files that train needs") as error:
        data.VocFolder(copy, "train", 21)
    for name in ("Scribbles/train_00002.png", "JPEGImages/train_00004.jpg", "PseudoDistance/train_00001.png"):
        assert name in str(error.value)
    assert len(data.VocFolder(copy, "val", 21)) == 3
    (copy / "train.txt").write_text("".join(f"none{i}\n" for i in range(40)))
    with pytest.raises(ValueError, match=r"lacks 200 files .* and 190 more"):
        data.VocFolder(copy, "train", 21)


def test_bad_folders_are_refused(copy: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is missing"):
        data.VocFolder(copy / "nowhere", "train", 21)
    with pytest.raises(ValueError, match="is a file"):
        data.VocFolder(copy / "val.txt", "train", 21)
    (copy / "val.txt").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        data.VocFolder(copy, "val", 21)
    (copy / "val.txt").write_text("val_00001\nval_00000\nval_00001\n")
    with pytest.raises(ValueError, match="names val_00001 more than once"):
        data.VocFolder(copy, "val", 21)
    (copy / "val.txt").unlink()
    with pytest.raises(ValueError, match=r"no val.txt"):
        data.VocFolder(copy, "val", 21)
    (copy / "PseudoLabels").rename(copy / "Other")
    with pytest.raises(ValueError, match="no folder PseudoLabels"):
        data.VocFolder(copy, "train", 21)
    assert len(data.VocFolder(copy, "train", 21, {**data.FOLDERS, "pseudo": "Other"})) == 6
    with pytest.raises(ValueError, match="have 6 classes, num_classes is 5"):
        data.class_names(str(copy), 5)


def test_bad_files_are_named(copy: Path) -> None:
    place = copy / "SegmentationClassAug" / "val_00001.png"
    source = data.VocFolder(copy, "val", 6)
    good = files.read_map(place, 6)

    def says(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            source[1]

    files.write_map(torch.where(good == 0, 9, good).to(torch.uint8), place)
    says(r"below num_classes 6, or 255 for none; .*val_00001.png holds 9")
    files.write_map(good[:-1], place)
    says(r"its image's size \d+×\d+, .*val_00001.png has \d+×\d+")
    Image.fromarray(np.zeros((*good.shape, 3), dtype=np.uint8)).save(place)
    says("has mode RGB; convert it")
    place.write_bytes(place.read_bytes()[:40])
    says(r"label map .*val_00001.png cannot be read")
    files.write_map(good, place)
    (copy / "JPEGImages" / "val_00001.jpg").write_text("no image")
    says(r"image .*val_00001.jpg cannot be read")


def test_the_centre_crop_holds_the_middle_and_fills_the_rest() -> None:
    image = torch.arange(3 * 6 * 10, dtype=torch.uint8).view(3, 6, 10)
    inner = data.centre_crop(image, 4, data.MEAN)
    assert torch.equal(inner, image[:, 1:5, 3:7])
    outer = data.centre_crop(image, 12, data.MEAN)
    assert torch.equal(outer[:, 3:9, 1:11], image)
    assert outer[:, 0, 0].tolist() == list(data.MEAN)
    item = data.LabelledScenes(scenes.Scenes("val", SIDE), 64)[0]
    inside = (item["label"] != 255).sum()
    assert item["label"].shape == (64, 64) and inside == SIDE * (SIDE * 3 // 4)
    assert item["size"].tolist() == [64, 64]


def test_training_items_do_not_hold_the_true_labels() -> None:
    assert set(data.TrainingScenes(scenes.Scenes("train", SIDE))[0]) == {"image", *data.TRAINING}


def training_item(i: int = 0) -> dict[str, Tensor]:
    return data.TrainingScenes(scenes.Scenes("train", SIDE))[i]


def test_without_changes_a_crop_is_the_scene_itself() -> None:
    item = training_item()
    height, width = item["pseudo"].shape
    # The crop's place is drawn: find it by what is outside.
    out = augment(item, key(0), PLAIN)
    assert all(out[name].shape[-2:] == (SIDE, SIDE) and out[name].dtype == torch.uint8 for name in out)
    wide = Augmentation(crop=3 * SIDE, scale=(1.0, 1.0), rotate=0.0, flip=False, blur=0.0)
    out = augment({**item, "near_scribble": torch.full_like(item["pseudo"], 200)}, key(1), wide)
    inside = out["near_scribble"] == 200
    assert 0.9 * height * width < int(inside.sum()) <= height * width, "all of it is there, but for half a pixel"
    outside = out["near_scribble"] == 0
    for name, nothing in (("scribble", 255), ("pseudo", 255), ("near_pseudo", 0)):
        assert (out[name][outside] == nothing).all()
    assert (out["image"][:, outside] == torch.tensor(data.MEAN, dtype=torch.uint8)[:, None]).all()


def test_labels_are_never_mixed_and_255_stays_255() -> None:
    strong = Augmentation(crop=64, scale=(0.5, 2.0), rotate=10.0, flip=True, blur=0.5)
    for i in range(12):
        item = training_item(i)
        out = augment(item, key(i), strong)
        for name in ("scribble", "pseudo"):
            assert set(out[name].unique().tolist()) <= set(item[name].unique().tolist()) | {255}


def test_every_map_moves_with_the_image() -> None:
    """All of them are made the same picture; then all must stay the same, wherever the scene is."""
    strong = Augmentation(crop=64, scale=(0.5, 2.0), rotate=10.0, flip=True, blur=0.0)
    picture = (scenes.Scenes("train", SIDE)[3]["label"] > 0).to(torch.uint8) * 200
    item = dict.fromkeys(data.TRAINING, picture) | {"image": picture.expand(3, -1, -1)}
    for i in range(8):
        out = augment(item, key(i), strong)
        inside = augment({**item, "near_pseudo": torch.full_like(picture, 255)}, key(i), strong)["near_pseudo"] == 255
        bright = {name: (out[name].float() > 100)[inside] for name in ("pseudo", "near_scribble", "near_pseudo")}
        image = (out["image"][0].float() > 100)[inside]
        assert all((mask == image).float().mean() > 0.97 for mask in bright.values())
        assert torch.equal(out["scribble"], out["pseudo"]) and torch.equal(out["near_scribble"], out["near_pseudo"])


def test_scale_turn_and_flip_do_what_they_say() -> None:
    picture = torch.zeros(81, 81, dtype=torch.uint8)
    picture[40, 60] = 255  # 20 to the right of the middle
    item = dict.fromkeys(data.TRAINING, picture) | {"image": picture.expand(3, -1, -1)}
    sides = set()
    for i in range(20):
        # At scale 1 the crop has no room to move: it is the scene.
        out = augment(item, key(i), Augmentation(crop=81, scale=(1.0, 1.0), rotate=30.0, flip=True, blur=0.0))
        mass = out["near_scribble"].double()
        axis = torch.arange(81) - 40.0
        x, y = float((mass.sum(0) * axis).sum() / mass.sum()), float((mass.sum(1) * axis).sum() / mass.sum())
        assert np.hypot(x, y) == pytest.approx(20, abs=0.6)
        assert abs(np.degrees(np.arctan2(y, abs(x)))) <= 30.5
        sides.add(x > 0)
    assert sides == {True, False}
    white, anyhow = (
        {**item, "near_pseudo": torch.full_like(picture, 255)},
        Augmentation(200, (0.5, 2.0), 0.0, False, 0.0),
    )
    sizes = [float((augment(white, key(i), anyhow)["near_pseudo"] > 127).sum()) ** 0.5 / 81 for i in range(30)]
    assert 0.48 < min(sizes) < 0.7 and 1.8 < max(sizes) < 2.02


def test_blur_keeps_the_mean_and_smooths() -> None:
    item = training_item(2)
    sharp = augment(item, key(5), PLAIN)["image"].float()
    soft = augment(item, key(5), Augmentation(SIDE, (1.0, 1.0), 0.0, False, 1.0))["image"].float()
    assert abs(float(sharp.mean() - soft.mean())) < 1
    assert soft.diff(dim=-1).abs().mean() < 0.9 * sharp.diff(dim=-1).abs().mean()


def test_blur_is_a_convolution() -> None:
    image, ranges = torch.rand(3, 20, 30) * 255, Augmentation(SIDE, (1.0, 1.0), 0.0, False, 1.0, (0.7, 0.7))
    kernel = torch.exp(-torch.arange(-3, 4.0).square() / (2 * 0.7**2))
    kernel = torch.outer(kernel, kernel) / kernel.sum() ** 2
    padded = torch.nn.functional.pad(image[:, None], (3,) * 4, mode="replicate")
    expected = torch.nn.functional.conv2d(padded, kernel[None, None])[:, 0]
    torch.testing.assert_close(_blur(image, key(0), ranges), expected, rtol=1e-5, atol=1e-3)


def test_augmentation_depends_on_the_key_alone() -> None:
    strong = Augmentation(crop=64, scale=(0.5, 2.0), rotate=10.0, flip=True, blur=0.5)
    item = training_item(1)
    one, again, later = (augment(item, k, strong) for k in (key(1), key(1), key(1, epoch=1)))
    torch.set_default_dtype(torch.float64)
    in_float64 = augment(item, key(1), strong)
    torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one[name], again[name]) and torch.equal(one[name], in_float64[name]) for name in one)
    assert not torch.equal(one["image"], later["image"])


def test_inputs_are_sorted_and_keep_their_names(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg", "sub/c.PNG", ".hidden.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (10, 6), (10, 20, 30)).save(tmp_path / name)
    inputs = data.Inputs(tmp_path)
    assert [str(inputs.output(file)) for file in inputs.files] == ["a.png", "b.png", "sub/c.png"]
    assert inputs[1]["image"].shape == (3, 6, 10) and inputs[1]["size"].tolist() == [6, 10]
    assert len(data.Inputs(tmp_path / "b.png")) == 1
    Image.new("RGB", (10, 6)).save(tmp_path / "b.jpg")
    with pytest.raises(ValueError, match=r"b.jpg and .*b.png would both give b.png; rename one"):
        data.Inputs(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        data.Inputs(tmp_path / "empty")
