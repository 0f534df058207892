"""The recipe `scribble`: the loss against torch's own, what 255 may not change, windows, metrics, files it leaves."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from lockstep import Loss
from lockstep.batching import Batching
from lockstep.distributed import World
from lockstep.evaluate import Evaluator
from lockstep.flags import parse
from lockstep.loss import Objective
from lockstep.optim import Schedule, scaled_lr
from lockstep.recipes.confusion import confusion_matrix
from lockstep.recipes.pixels import normalise, voc_palette
from lockstep.recipes.scribble import ScribbleRecipe, data, infer
from lockstep.recipes.scribble.model import Segmenter
from lockstep.recipes.scribble.recipe import ScribbleOptions
from lockstep.registry import find, spec_of
from lockstep.rng import Rng

SIDE = 32


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def recipe(**options: Any) -> ScribbleRecipe:
    return ScribbleRecipe(ScribbleOptions(**{"layers": 18, "crop_size": SIDE, "num_classes": 6, **options}))


def keys(indices: list[int]) -> Rng:
    index = torch.tensor(indices)
    return Rng.of(5, torch.zeros_like(index), index)


def batch_of(mine: ScribbleRecipe, indices: list[int]) -> dict[str, Tensor]:
    train = mine.dataset("train")
    return mine.collate([mine.augment(train[i], keys([i])) for i in indices])


class Fixed(nn.Module):
    """A segmenter that answers the same scores whatever it is shown."""

    lorm = None

    def __init__(self, scores: Tensor):
        super().__init__()
        self.fixed = nn.Parameter(scores)

    def backbone(self, x: Tensor) -> list[Tensor]:
        return [x]

    def scores(self, stages: list[Tensor], x: Tensor) -> Tensor:
        return self.fixed


def terms(loss: Loss, counts: dict[str, Tensor]) -> dict[str, float]:
    assert loss.terms.keys() == counts.keys()
    return {name: (total / counts[name]).item() for name, total in loss.terms.items()}


@pytest.fixture(scope="module")
def scores() -> Tensor:
    return torch.randn(4, 6, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def test_the_recipe_is_found_by_name() -> None:
    assert find("scribble") is ScribbleRecipe and spec_of(ScribbleRecipe) == "scribble"


def test_each_term_is_torch_s_own_mean(scores: Tensor) -> None:
    weights = {"l_segs": 0.5, "l_pesudo": 2.0, "l_ds": 0.3, "l_dc": 0.7}
    mine = recipe(model_type="deeplabv2", smoothing=0.2, **weights)
    batch = batch_of(mine, [0, 1, 2, 3])
    means = terms(mine.loss(Fixed(scores), batch, keys([0, 1, 2, 3])), mine.term_counts(batch, keys([0, 1, 2, 3])))
    scribble, pseudo = batch["scribble"].long(), batch["pseudo"].long()
    segs = F.cross_entropy(scores, scribble, ignore_index=255)
    pesudo = F.cross_entropy(scores, pseudo, ignore_index=255, label_smoothing=0.2)
    assert means["segs"] == pytest.approx(0.5 * segs.item(), rel=1e-5)
    assert means["pesudo"] == pytest.approx(2.0 * pesudo.item(), rel=1e-5)
    entropy = torch.distributions.Categorical(logits=scores.permute(0, 2, 3, 1)).entropy()
    for name, near, weight in (("ds", "near_scribble", 0.3), ("dc", "near_pseudo", 0.7)):
        d = batch[near].float() / 255
        assert means[name] == pytest.approx(weight * ((entropy * d)[d > 0].mean()).item(), rel=1e-5)


def test_pixels_without_a_label_change_nothing(scores: Tensor) -> None:
    mine = recipe(model_type="deeplabv2")
    batch = batch_of(mine, [0, 1, 2, 3])
    for label, names in (("scribble", ["segs"]), ("pseudo", ["pesudo"])):
        ignored = batch[label] == 255
        assert 0 < ignored.sum() < ignored.numel()
        other = torch.where(ignored[:, None], -7 * scores, scores)
        one, two = (mine.loss(Fixed(x), batch, keys([0, 1, 2, 3])).terms for x in (scores, other))
        for name in names:
            assert torch.equal(one[name], two[name])
        model = Fixed(scores)
        loss = mine.loss(model, batch, keys([0, 1, 2, 3])).terms[names[0]]
        (gradient,) = torch.autograd.grad(loss, model.fixed)
        assert not gradient[ignored[:, None].expand_as(gradient)].any() and gradient.any()


def test_evaluation_leaves_out_pixels_without_a_label() -> None:
    label = torch.tensor([[[0, 1, 255], [2, 255, 1]]])
    predicted = torch.tensor([[[0, 2, 1], [2, 0, 1]]])
    matrix = confusion_matrix(predicted, label, 3)
    assert torch.equal(matrix, confusion_matrix(torch.where(label == 255, 2, predicted), label, 3))
    assert matrix.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]


@pytest.mark.usefixtures("float64")
def test_a_batch_weighs_as_much_as_its_samples() -> None:
    """Without BatchNorm's doing (eval), terms and counts of a batch are the sums over its samples."""
    torch.manual_seed(0)
    mine = recipe()
    model, indices = mine.model().eval(), [3, 17, 4]
    together = mine.loss(model, batch_of(mine, indices), keys(indices)).terms
    counts = mine.term_counts(batch_of(mine, indices), keys(indices))
    alone = [mine.loss(model, batch_of(mine, [i]), keys([i])).terms for i in indices]
    for name, total in together.items():
        assert total.dtype == torch.float64
        torch.testing.assert_close(sum(part[name] for part in alone), total, rtol=1e-10, atol=1e-12)
        assert counts[name] == sum(mine.term_counts(batch_of(mine, [i]), keys([i]))[name] for i in indices)


def test_the_count_of_lorm_is_that_of_foreground_positions() -> None:
    mine = recipe(crop_size=40)
    batch = batch_of(mine, [0, 1, 2])
    counts = mine.term_counts(batch, keys([0, 1, 2]))
    middle = batch["pseudo"][:, 4::8, 4::8]
    assert middle.shape == (3, 5, 5)
    assert counts["lorm"] == int(((middle > 0) & (middle < 255)).sum()) > 0
    assert "lorm" not in recipe(model_type="deeplabv3p").term_counts(batch, keys([0, 1, 2]))


def test_the_loss_is_float32_under_autocast() -> None:
    torch.manual_seed(0)
    mine, indices = recipe(), [1, 2, 3]
    model, batch = mine.model(), batch_of(mine, indices)
    plain = mine.loss(model, batch, keys(indices)).terms
    with torch.autocast("cpu", torch.bfloat16):
        mixed = mine.loss(model, batch, keys(indices)).terms
    for name, total in mixed.items():
        assert total.dtype == torch.float32
        assert total.item() == pytest.approx(plain[name].item(), rel=0.05)


@pytest.mark.slow
def test_the_objective_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    mine, indices = recipe(), [0, 1]
    model = mine.model()
    objective = Objective(mine.loss, model, seed=5)
    batch, index = batch_of(mine, indices), torch.tensor(indices)
    per_sample = {name: count / 2 for name, count in mine.term_counts(batch, keys(indices)).items()}
    torch.compiler.reset()
    try:
        compiled = torch.compile(objective, fullgraph=True, backend="eager")
        total, weight, logs = compiled(batch, index * 0, index, per_sample)
        total.backward()
    finally:
        torch.compiler.reset()
    assert weight == 2 and set(logs) == {"segs", "pesudo", "ds", "dc", "lorm"}
    assert all(p.grad is not None for p in model.parameters()), "every parameter takes part"


def brute_force(truth: np.ndarray, predicted: np.ndarray, classes: int) -> tuple[float, float, dict[int, float]]:
    known = truth != 255
    ious = {}
    for k in range(classes):
        a, b = (truth == k) & known, (predicted == k) & known
        if (a | b).any():
            ious[k] = (a & b).sum() / (a | b).sum()
    return float(np.mean(list(ious.values()))), float((truth == predicted)[known].mean()), ious


def test_metrics_are_the_brute_force_ones_and_exact_over_any_split() -> None:
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 5, (7, 13, 11))  # class 5 is neither there nor predicted
    predicted = np.where(generator.random(truth.shape) < 0.6, truth, generator.integers(0, 5, truth.shape))
    truth[generator.random(truth.shape) < 0.2] = 255
    mine = recipe()
    pairs = list(zip(torch.from_numpy(truth), torch.from_numpy(predicted), strict=True))
    whole = confusion_matrix(torch.from_numpy(predicted), torch.from_numpy(truth), 6)
    parts = sum(confusion_matrix(p, t, 6) for t, p in pairs)
    assert whole.dtype == torch.int64 and torch.equal(whole, parts)  # type: ignore[arg-type]
    values = mine.metrics({"confusion": whole})
    miou, accuracy, ious = brute_force(truth, predicted, 6)
    assert values["miou"] == pytest.approx(miou, rel=1e-12) and values["accuracy"] == pytest.approx(accuracy, rel=1e-6)
    assert {f"iou/{mine.names[k]}" for k in ious} == set(values) - {"miou", "accuracy"}
    assert all(values[f"iou/{mine.names[k]}"] == pytest.approx(iou, rel=1e-12) for k, iou in ious.items())


class Blurry(nn.Module):
    """Scores that depend on a neighbourhood of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 6, 5, padding=2))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return self.layers(x)


@pytest.mark.parametrize("size", [(32, 32), (20, 32), (17, 9)])
def test_an_image_that_fits_the_window_is_the_plain_forward_pass(size: tuple[int, int]) -> None:
    model, image = Blurry(), torch.randn(3, *size)
    expected = model(image[None]).softmax(1)[0]
    for base in (0, max(size)):
        assert torch.equal(infer.probabilities(model, image, 32, [1.0], base), expected)


def test_windows_cover_everything_and_are_averaged() -> None:
    model, image = Blurry(), torch.randn(1, 3, 50, 40)
    total, count = torch.zeros(1, 6, 50, 40), torch.zeros(50, 40)
    for top in (0, 16, 26):
        for left in (0, 16):
            part = model(image[:, :, top : top + 24, left : left + 24]).softmax(1)
            total[:, :, top : top + 24, left : left + 24] += part
            count[top : top + 24, left : left + 24] += 1
    assert count.min() > 0
    torch.testing.assert_close(infer.sliding_window(model, image, 24), total / count)
    everything = infer.probabilities(model, image[0], 24, [0.5, 1.0, 2.0], 0)
    torch.testing.assert_close(everything.sum(0), torch.ones(50, 40))
    model.seen.clear()
    infer.probabilities(model, image[0], 24, [1.0], 20)
    assert model.seen == [(1, 3, 20, 16)], "the longer side has base_size pixels"


def write_inputs(folder: Path) -> list[tuple[int, int]]:
    sizes = [(40, 33), (24, 61), (32, 32), (50, 20), (33, 40)]
    generator = np.random.default_rng(0)
    folder.mkdir()
    for i, (height, width) in enumerate(sizes):
        Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"x{i}.png")
    return sizes


def test_predictions_have_the_input_s_size_order_and_name_in_any_batch(tmp_path: Path) -> None:
    from contextlib import nullcontext

    sizes = write_inputs(tmp_path / "in")
    mine, model = recipe(test_scales=(0.5, 1.0), base_size=0), Blurry()
    inputs = mine.predict_dataset(tmp_path / "in")
    by = {n: Evaluator(mine, model, World(), nullcontext(), 0).predict(inputs, n) for n in (1, 2, 5)}
    for one, two, five, size in zip(by[1], by[2], by[5], sizes, strict=True):
        assert tuple(one.shape) == size and one.dtype == torch.uint8
        assert torch.equal(one, two) and torch.equal(one, five)
    made = mine.save_predictions(by[2], inputs, tmp_path / "out")
    assert [file.name for file in made] == [f"x{i}.png" for i in range(5)]
    for file, labels in zip(made, by[1], strict=True):
        image = Image.open(file)
        assert image.mode == "P" and image.getpalette()[: 3 * 6] == voc_palette()[:6].flatten().tolist()  # type: ignore[index]
        assert np.array_equal(np.array(image), labels.numpy())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["overlays", *(file.name for file in made)]
    for file, (height, width) in zip(made, sizes, strict=True):
        assert Image.open(tmp_path / "out/overlays" / file.name).size == (width, height)
    text = mine.describe_predictions(by[1], inputs)
    assert text.startswith("5 images; share of pixels: ") and text.count("%") >= 1


def test_overlays_do_not_replace_the_maps_of_a_folder_with_that_name(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in")
    write_inputs(tmp_path / "in/overlays")
    mine = recipe()
    inputs = mine.predict_dataset(tmp_path / "in")
    maps = [torch.zeros(item["image"].shape[1:], dtype=torch.uint8) for item in inputs]  # type: ignore[attr-defined]
    made = mine.save_predictions(maps, inputs, tmp_path / "out")
    assert len(made) == 10 and all(Image.open(file).mode == "P" for file in made)
    assert Image.open(tmp_path / "out/overlays_made/overlays/x0.png").mode == "RGB"


def test_a_test_counts_every_labelled_pixel_once() -> None:
    mine, model = recipe(test_scales=(1.0, 1.25), base_size=0), Blurry()
    source = mine.dataset("test")
    items = [source[i] for i in range(4)]
    assert len({item["image"].shape for item in items}) == 2, "upright and lying scenes"
    sums = mine.test_batch(model, mine.collate(items), keys([0, 1, 2, 3]))
    alone = sum(mine.test_batch(model, mine.collate([x]), keys([0]))["confusion"] for x in items)  # type: ignore[misc]
    assert torch.equal(sums["confusion"], alone)  # type: ignore[arg-type]
    assert sums["confusion"].sum() == sum(int((item["label"] != 255).sum()) for item in items)  # type: ignore[union-attr]


def has_titles(file: Path) -> bool:
    """Whether there is something dark at the top of each of three columns."""
    strip = np.array(Image.open(file).convert("L"))[:16]
    return all(column.min() < 100 < 250 < column.max() for column in np.array_split(strip, 3, axis=1))


@pytest.mark.slow
def test_a_test_leaves_a_table_and_a_picture(tmp_path: Path) -> None:
    mine = recipe()
    matrix = torch.zeros(6, 6, dtype=torch.int64)
    matrix[0, 0], matrix[1, 1], matrix[1, 0], matrix[2, 2] = 50, 6, 2, 9
    values = mine.metrics({"confusion": matrix})
    table, picture = mine.save_test({"confusion": matrix}, values, tmp_path)
    rows = list(csv.DictReader(table.open()))
    assert [row["name"] for row in rows] == list(mine.names) and rows[4]["iou"] == ""
    assert float(rows[1]["iou"]) == 0.75 and (rows[1]["pixels"], rows[1]["predicted"], rows[1]["both"]) == (
        "8",
        "6",
        "6",
    )
    assert np.mean([float(row["iou"]) for row in rows if row["iou"]]) == pytest.approx(values["miou"], abs=1e-6)
    assert Image.open(picture).size[0] > 300 and len(list(tmp_path.iterdir())) == 2
    items = [mine.dataset("test")[i] for i in range(4)]
    mine.test_batch(Blurry(), mine.collate(items), keys([0, 1, 2, 3]))
    *_, examples = mine.save_test({"confusion": matrix}, values, tmp_path)
    assert examples.name == "examples.png" and has_titles(examples)


def settings(*flags: str) -> Any:
    return parse(ScribbleRecipe, list(flags), "test")


def test_the_learning_rate_follows_the_global_batch_and_not_the_gpus() -> None:
    for micro, world in ((16, 1), (8, 2), (4, 4)):
        request = settings("--batchsize", str(micro), "--workers", "4")
        sizes = Batching.plan(request.train.data, 10_582, world)
        assert scaled_lr(request.train.optim, sizes.global_batch) == pytest.approx(1e-3)
        schedule = Schedule(request.train.optim, sizes)
        assert schedule.warmup == round(5 * 10_582 / 16) or abs(schedule.warmup - 5 * 10_582 / 16) <= 5
    doubled = settings("--batchsize", "16")
    assert scaled_lr(doubled.train.optim, Batching.plan(doubled.train.data, 10_582, 2).global_batch) == pytest.approx(
        2e-3
    )
    optim, run = doubled.train.optim, doubled.train.run
    assert (optim.optimizer, optim.momentum, optim.weight_decay, optim.schedule) == ("sgd", 0.9, 5e-4, "cosine")
    assert (run.best_metric, run.best_mode, run.eval_every) == ("miou", "max", "1ep")


def test_the_guide_s_flags_are_understood() -> None:
    flags = "--distributed --local_rank=0 --world_size 1 --dist_url env:// --layers 50 --model_type res50_ASPP_lorm"
    request = settings(*flags.split(), "--dataset_path", "somewhere", "--numclasses", "21", "--l_pesudo", "0.5")
    assert request.options.data_path == "somewhere" and request.options.l_pesudo == 0.5
    assert request.train.hardware.distributed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "num_classes is 2 to 255"),
        ({"crop_size": 31}, "crop_size is at least 32, not 31"),
        ({"scale": (2.0, 0.5)}, "the smaller one first"),
        ({"blur": 1.5}, r"blur is in \[0, 1\]"),
        ({"smoothing": 1.0}, r"smoothing is in \[0, 1\), not 1.0"),
        ({"l_ds": -1.0}, "l_ds is 0 or more, not -1"),
        ({"l_lorm": float("nan")}, "l_lorm is 0 or more"),
        ({"test_scales": ()}, "test_scales are one or more"),
        ({"test_scales": (0.0,)}, "factors above 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**options)


def test_weights_are_loaded_when_a_run_begins(tmp_path: Path) -> None:
    mine = recipe(model_path=str(tmp_path / "w.pth"))
    model = mine.model()
    assert isinstance(model, Segmenter)
    wanted = {name: torch.full_like(t, 0.5) for name, t in model.backbone.state_dict().items()}
    torch.save(wanted, tmp_path / "w.pth")
    assert "w.pth" in (mine.load_pretrained(model) or "")
    assert (model.backbone.get_parameter("layer1.0.conv1.weight") == 0.5).all()
    assert "from scratch" in (recipe().load_pretrained(model) or "")


def test_smoke_makes_everything_small() -> None:
    mine = ScribbleRecipe(ScribbleOptions())
    mine.smoke()
    assert mine.options.crop_size == 64 and mine.options.test_scales == (1.0,)
    assert mine.dataset("val")[0]["image"].shape == (3, 64, 64)


def test_images_are_normalised_as_imagenet_s_are() -> None:
    mean = normalise(torch.tensor(data.MEAN, dtype=torch.uint8)[None, :, None, None])
    assert mean.abs().max() < 0.02, "the filling is nothing to the network"
    white = normalise(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
    torch.testing.assert_close(white, torch.tensor([0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225]))
