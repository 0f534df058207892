"""The recipe `vision`: losses, variation and metrics by hand; settings; what tests and predictions write."""

import csv
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lockstep.distributed import World
from lockstep.evaluate import Evaluator
from lockstep.flags import parse
from lockstep.loss import Objective
from lockstep.precision import choose
from lockstep.recipes.confusion import class_mean, confusion_matrix, per_class
from lockstep.recipes.pixels import normalise
from lockstep.recipes.vision import VisionRecipe
from lockstep.recipes.vision.losses import soft_dice
from lockstep.recipes.vision.recipe import VisionOptions, translate
from lockstep.recipes.vision.report import palette
from lockstep.registry import find
from lockstep.rng import Rng

SIDE = 16


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def logging_put_back() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers = handlers


def recipe(**options: Any) -> VisionRecipe:
    return VisionRecipe(VisionOptions(**{"width": 2, "img_size": SIDE, "max_samples": 40, **options}))


def collate(mine: VisionRecipe, indices: list[int]) -> dict[str, Tensor]:
    items = mine.dataset("train").__getitems__(indices)  # type: ignore[union-attr]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def keys(indices: list[int], epoch: int = 0) -> Rng:
    index = torch.tensor(indices)
    return Rng.of(5, torch.full_like(index, epoch), index)


class Answers(nn.Module):
    """A model that answers what it is told to, and remembers what it saw."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return self.logits[: len(x)]


def test_the_recipe_is_found_by_name() -> None:
    assert find("vision") is VisionRecipe


def test_the_samples_of_these_tests_are_of_several_classes() -> None:
    assert len(set(collate(recipe(), list(range(40)))["label"].tolist())) > 5


def test_classification_is_cross_entropy_with_smoothing_in_training_alone() -> None:
    mine, indices = recipe(label_smoothing=0.2), [3, 11, 25, 8]
    batch, logits = collate(mine, indices), torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    for training, smoothing in ((True, 0.2), (False, 0.0)):
        loss = mine.loss(Answers(logits).train(training), batch, keys(indices))
        total = 0.0
        for i in range(4):
            target = np.full(10, smoothing / 10)
            target[int(batch["label"][i])] += 1 - smoothing
            z = logits[i].double().numpy()
            total += float(-(target * (z - np.log(np.exp(z).sum()))).sum())
        assert float(loss.total) == pytest.approx(total, rel=1e-5) and loss.weight == 4 and type(loss.weight) is int
        assert int(loss.logs["accuracy"]) == int((logits.argmax(1) == batch["label"]).sum())


def brute_dice(probability: np.ndarray, mask: np.ndarray) -> float:
    """Pixel by pixel, class by class, of the classes that are there; smoothing 1."""
    losses = []
    for k in range(len(probability)):
        overlap = p_sum = t_sum = 0.0
        for row in range(mask.shape[0]):
            for column in range(mask.shape[1]):
                if mask[row, column] != 255:
                    hit = float(mask[row, column] == k)
                    overlap += hit * probability[k, row, column]
                    p_sum += probability[k, row, column]
                    t_sum += hit
        if t_sum:
            losses.append(1 - (2 * overlap + 1) / (p_sum + t_sum + 1))
    return sum(losses) / len(losses)


def test_dice_is_the_formula_pixel_by_pixel() -> None:
    generator = np.random.default_rng(0)
    mask = generator.integers(0, 4, (3, 6, 6)).astype(np.uint8)
    mask[0, :2], mask[1] = 255, 2
    probability = generator.dirichlet(np.ones(4), (3, 6, 6)).transpose(0, 3, 1, 2)
    expected = [brute_dice(probability[i], mask[i]) for i in range(3)]
    assert soft_dice(torch.tensor(probability), torch.tensor(mask)).tolist() == pytest.approx(expected, rel=1e-12)
    perfect = torch.nn.functional.one_hot(torch.tensor(mask[1:]).long().clamp(max=3), 4).movedim(-1, 1).double()
    assert soft_dice(perfect, torch.tensor(mask[1:])).tolist() == pytest.approx([0, 0])


@pytest.mark.usefixtures("float64")
def test_segmentation_is_dice_and_half_the_cross_entropy_of_each_image() -> None:
    mine, indices = recipe(model="unet"), [3, 11, 25]
    batch = collate(mine, indices)
    batch["mask"][1, :5] = 255
    logits = torch.randn(3, 11, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    loss = mine.loss(Answers(logits).eval(), batch, keys(indices))
    total = 0.0
    for i in range(3):
        mask, log_p = batch["mask"][i].long(), logits[i].log_softmax(0)
        pixels = [-float(log_p[mask[r, c], r, c]) for r in range(SIDE) for c in range(SIDE) if int(mask[r, c]) != 255]
        total += brute_dice(log_p.exp().numpy(), mask.numpy()) + 0.5 * sum(pixels) / len(pixels)
    assert float(loss.total) == pytest.approx(total, rel=1e-9) and loss.weight == 3
    nothing = {**batch, "mask": torch.full_like(batch["mask"], 255)}
    assert float(mine.loss(Answers(logits).eval(), nothing, keys(indices)).total) == 0


def test_images_are_normalised_by_imagenet() -> None:
    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = (image.numpy() / 255 - np.array([0.485, 0.456, 0.406])[:, None, None]) / np.array([0.229, 0.224, 0.225])[
        :, None, None
    ]
    assert normalise(image).numpy() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_shifting_moves_pixels_and_fills() -> None:
    picture = torch.arange(2 * 3 * 5 * 5).view(2, 3, 5, 5).to(torch.uint8)
    shift = torch.tensor([[0, 4], [3, 2]])
    moved = translate(picture, shift, 2, 99)
    for i in range(2):
        for row in range(5):
            for column in range(5):
                r, c = row + int(shift[i, 0]) - 2, column + int(shift[i, 1]) - 2
                expected = picture[i, :, r, c] if 0 <= r < 5 and 0 <= c < 5 else torch.full((3,), 99)
                assert torch.equal(moved[i, :, row, column], expected.to(torch.uint8))


def test_a_mask_is_varied_with_its_image() -> None:
    """The mask as the image: whatever happens to one happens to the other."""
    mine, indices = recipe(model="unet", crop=3), list(range(24))
    mask = collate(mine, indices)["mask"]
    image, varied = mine.flip_and_shift(mask[:, None].expand(-1, 3, -1, -1), mask, keys(indices))
    known = varied != 255
    assert torch.equal(image[:, 0][known], varied[known]) and (image[:, 0][~known] == 0).all()
    assert (~known).any() and not torch.equal(varied, mask)
    flips = keys(indices).bernoulli("flip", 0.5)
    assert 0 < int(flips.sum()) < 24
    alone = recipe(model="unet", crop=0)
    expected = torch.stack([m.flip(1) if f else m for m, f in zip(mask, flips, strict=True)])
    assert torch.equal(alone.flip_and_shift(mask[:, None].expand(-1, 3, -1, -1), mask, keys(indices))[1], expected)


def test_variation_is_of_the_sample_and_of_training_alone() -> None:
    mine = recipe()
    batch = collate(mine, [4, 9, 30])
    whole = mine.flip_and_shift(batch["image"], batch["label"], keys([4, 9, 30]))[0]
    part = mine.flip_and_shift(batch["image"][1:2], batch["label"][1:2], keys([9]))[0]
    assert torch.equal(whole[1:2], part)
    assert not torch.equal(whole, mine.flip_and_shift(batch["image"], batch["label"], keys([4, 9, 30], epoch=1))[0])
    model = Answers(torch.zeros(3, 10)).eval()
    mine.loss(model, batch, keys([4, 9, 30]))
    assert torch.equal(model.seen, normalise(batch["image"]))
    still = recipe(flip=False, crop=0)
    assert torch.equal(still.flip_and_shift(batch["image"], batch["label"], keys([4, 9, 30]))[0], batch["image"])


@pytest.mark.parametrize("model", ["vit_s", "unet"])
@pytest.mark.usefixtures("float64")
def test_the_loss_of_a_batch_is_the_sum_over_its_samples(model: str) -> None:
    mine, indices = recipe(model=model), [3, 17, 4, 39]
    torch.manual_seed(0)
    network = mine.model()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # its statistics are of the batch; everything else is of the sample
    network.training = True
    together = mine.loss(network, collate(mine, indices), keys(indices))
    alone = [mine.loss(network, collate(mine, [i]), keys([i])) for i in indices]
    assert together.total.dtype == torch.float64
    torch.testing.assert_close(sum(loss.total for loss in alone), together.total, rtol=1e-12, atol=0)
    assert sum(loss.weight for loss in alone) == together.weight


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", "unet"])
def test_the_objective_compiles_as_one_graph(model: str) -> None:
    mine, indices = recipe(model=model), [1, 2, 3, 4]
    objective = Objective(mine.loss, mine.model().eval(), seed=5)
    objective.model.training = True  # variation on, norms as they are
    batch, index = collate(mine, indices), torch.tensor(indices)
    torch.compiler.reset()
    try:
        total, weight, _ = torch.compile(objective, fullgraph=True, backend="aot_eager")(batch, index * 0, index)
        total.backward()
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(total, objective(batch, index * 0, index)[0], rtol=1e-4, atol=1e-4)
    assert weight == 4


def brute_f1(truth: list[int], prediction: list[int], classes: int) -> list[float]:
    values = []
    for k in range(classes):
        tp = sum(t == k and p == k for t, p in zip(truth, prediction, strict=True))
        fp = sum(t != k and p == k for t, p in zip(truth, prediction, strict=True))
        fn = sum(t == k and p != k for t, p in zip(truth, prediction, strict=True))
        values.append(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else float("nan"))
    return values


def test_macro_f1_iou_and_confusion_are_those_of_brute_force() -> None:
    generator = np.random.default_rng(1)
    truth, prediction = generator.integers(0, 5, 300), generator.integers(0, 5, 300)
    truth[truth == 3], prediction[prediction == 3] = 1, 2  # class 3 is nowhere, class 5 neither
    matrix = confusion_matrix(torch.tensor(prediction), torch.tensor(truth), 6)
    assert matrix.dtype == torch.int64 and int(matrix.sum()) == 300
    for t in range(6):
        for p in range(6):
            assert int(matrix[t, p]) == int(((truth == t) & (prediction == p)).sum())
    expected = brute_f1(truth.tolist(), prediction.tolist(), 6)
    values = per_class(matrix)
    assert values.f1.tolist() == pytest.approx(expected, nan_ok=True)
    assert class_mean(values.f1) == pytest.approx(np.nanmean(expected))
    iou = [f / (2 - f) for f in expected]
    assert values.iou.tolist() == pytest.approx(iou, nan_ok=True)


def test_macro_f1_agrees_with_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    generator = torch.Generator().manual_seed(0)
    truth, prediction = torch.randint(0, 5, (2, 400), generator=generator)
    matrix = confusion_matrix(prediction, truth, 5)
    assert class_mean(per_class(matrix).f1) == pytest.approx(
        float(functional.multiclass_f1_score(prediction, truth, 5, average="macro"))
    )
    assert class_mean(per_class(matrix).iou) == pytest.approx(
        float(functional.multiclass_jaccard_index(prediction, truth, 5, average="macro"))
    )


def test_pixels_without_a_label_are_in_no_matrix() -> None:
    truth = torch.tensor([[0, 255], [1, 255]], dtype=torch.uint8)
    assert confusion_matrix(torch.tensor([[0, 1], [0, 0]]), truth, 2).tolist() == [[1, 0], [1, 0]]


@pytest.mark.parametrize("model", ["resnet18", "unet"])
def test_evaluation_does_not_depend_on_the_batch(model: str) -> None:
    mine = recipe(model=model)
    torch.manual_seed(0)
    network, world = mine.model(), World()
    results = [
        Evaluator(mine, network, world, nullcontext(), 0).evaluate(mine.dataset("test"), size) for size in (40, 7)
    ]
    assert torch.equal(results[0][1]["confusion"], results[1][1]["confusion"])
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert int(results[0][1]["confusion"].sum()) == 40 * (SIDE * SIDE if model == "unet" else 1)
    assert {"loss", "accuracy"} <= set(results[0][0])


def write_inputs(folder: Path, count: int = 11) -> Path:
    folder.mkdir()
    shapes = recipe(max_samples=None).dataset("test")
    for i in range(count):
        picture = Image.fromarray(shapes[i]["image"].permute(1, 2, 0).contiguous().numpy())  # type: ignore[index]
        picture.resize((20 + i, 30)).save(folder / f"{(i * 7) % count:02d}.png")
    return folder


def predicted(mine: VisionRecipe, network: nn.Module, folder: Path, size: int, out: Path) -> list[list[str]]:
    data = mine.predict_dataset(folder)
    made = Evaluator(mine, network, World(), nullcontext(), 0).predict(data, size)
    out.mkdir()
    best, *_ = mine.save_predictions(made, data, out)
    return list(csv.reader(best.read_text().splitlines()))


def test_predictions_keep_the_order_of_the_input(tmp_path: Path) -> None:
    mine, folder = recipe(), write_inputs(tmp_path / "in")
    torch.manual_seed(0)
    network = mine.model().eval()
    tables = [predicted(mine, network, folder, size, tmp_path / str(size)) for size in (64, 4, 1)]
    for header, *rows in tables:
        assert header == ["file", "class", "probability"] and [row[0] for row in rows] == sorted(
            p.name for p in folder.iterdir()
        )
        assert [row[:2] for row in rows] == [row[:2] for row in tables[0][1:]]
        assert [float(row[2]) for row in rows] == pytest.approx([float(row[2]) for row in tables[0][1:]], abs=2e-6)
    for name, label, probability in tables[0][1:]:
        alone = network(normalise(mine.predict_dataset(folder / name)[0]["image"][None])).softmax(1)[0]
        assert label == mine.names[int(alone.argmax())] and float(probability) == pytest.approx(
            float(alone.max()), abs=2e-6
        )


def test_predicted_masks_have_the_size_of_their_images(tmp_path: Path) -> None:
    mine, folder = recipe(model="unet"), write_inputs(tmp_path / "in")
    torch.manual_seed(0)
    network = mine.model()
    tables = [predicted(mine, network, folder, size, tmp_path / str(size)) for size in (64, 3)]
    assert tables[0] == tables[1] and tables[0][0] == ["file", "mask", *mine.names]
    for row in tables[0][1:]:
        mask, image = Image.open(tmp_path / "64" / row[1]), Image.open(folder / row[0])
        assert mask.mode == "P" and mask.size == image.size and np.array(mask).max() < len(mine.names)
        assert sum(map(float, row[2:])) == pytest.approx(1, abs=1e-4)
        assert Image.open(tmp_path / "64" / "overlays" / row[0]).size == image.size
        assert np.array_equal(np.array(mask), np.array(Image.open(tmp_path / "3" / row[1])))


def test_predictions_are_summed_up(tmp_path: Path) -> None:
    folder = write_inputs(tmp_path / "in")
    for model, begins in (("resnet18", "2 images: 2 "), ("unet", "2 images; share of pixels: background 75.0 %, ")):
        mine = recipe(model=model)
        labels: list[Any] = [(0, 0.5), (0, 0.7)]
        masks = [torch.tensor([[0, 0], [0, 1]], dtype=torch.uint8)] * 2
        text = mine.describe_predictions(masks if mine.segments else labels, mine.predict_dataset(folder))
        assert text.startswith(begins) and (mine.segments or text.endswith("; mean probability 0.600"))


def test_smoothed_losses_and_dice_are_not_drawn_with_those_of_validation() -> None:
    assert set(recipe(label_smoothing=0.1).same_as_training()) == {"accuracy"}
    assert set(recipe().same_as_training()) == {"accuracy", "loss"}
    assert set(recipe(model="unet").same_as_training()) == {"loss"}


def test_the_palette_is_pascals() -> None:
    colours = palette()
    assert colours[:4].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert colours[15].tolist() == [192, 128, 128] and colours[20].tolist() == [0, 64, 128]


@pytest.mark.parametrize("model", ["resnet18", "unet"])
def test_a_test_writes_tables_and_plots(tmp_path: Path, model: str) -> None:
    pytest.importorskip("matplotlib")
    mine = recipe(model=model)
    torch.manual_seed(0)
    evaluator = Evaluator(mine, mine.model(), World(), nullcontext(), 0)
    values, sums = evaluator.evaluate(mine.dataset("test"), 16, testing=True)
    made = mine.save_test(sums, values, tmp_path)
    assert all(path.stat().st_size for path in made) and not list(tmp_path.glob(".*"))
    table = list(csv.DictReader((tmp_path / "per_class.csv").read_text().splitlines()))
    assert [row["class"] for row in table] == list(mine.names)
    name, column = ("dice", "dice") if model == "unet" else ("macro_f1", "f1")
    assert values[name] == pytest.approx(np.nanmean([float(row[column]) for row in table]), abs=1e-5)
    matrix = list(csv.reader((tmp_path / "confusion_matrix.csv").read_text().splitlines()))
    assert [[int(x) for x in row[1:]] for row in matrix[1:]] == sums["confusion"].tolist()
    for png in tmp_path.glob("*.png"):
        assert min(Image.open(png).size) > 100
    assert {p.name for p in tmp_path.glob("*.png")} == {"confusion_matrix.png"} | (
        {"per_class_iou.png", "examples.png"} if model == "unet" else {"per_class_f1.png"}
    )


def test_the_guides_config_is_understood(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text('ddp:\n  enabled: true\n  log_level: "INFO"\ngrad_accumulation_steps: 0\nschedule: cosine\n')
    request = parse(VisionRecipe, ["--config", str(config)], "test")
    assert request.train.hardware.distributed and request.options.log_level == "INFO"
    assert request.train.data.gradient_accumulation_steps == 0
    config.write_text("ddp:\n  enabled: true\n  loglevel: INFO\n")
    with pytest.raises(ValueError, match=r"there is no setting 'ddp.loglevel'"):
        parse(VisionRecipe, ["--config", str(config)], "test")


def test_an_unknown_schedule_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("schedule: onecycle\n")
    with pytest.raises(SystemExit):
        parse(VisionRecipe, ["--config", str(config)], "test")
    said = capsys.readouterr()
    assert "onecycle" in said.out + said.err and "cosine" in said.out + said.err


@pytest.mark.usefixtures("logging_put_back")
def test_the_log_level_is_python_loggings() -> None:
    recipe(log_level="debug")
    assert logging.getLogger().level == logging.DEBUG
    recipe()
    assert logging.getLogger().level == logging.DEBUG  # not given, not touched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width is at least 1"),
        ({"img_size": 4}, "img_size is at least 8"),
        ({"val_fraction": 1.0}, r"in \[0, 1\), not 1.0"),
        ({"label_smoothing": -0.1}, r"in \[0, 1\), not -0.1"),
        ({"dice_weight": 0.0, "cross_entropy_weight": 0.0}, "not both 0"),
        ({"log_level": "LOUD"}, "DEBUG, INFO, WARNING, ERROR, not LOUD"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**options)


def test_a_run_keeps_its_classes_and_other_data_are_refused() -> None:
    mine = recipe()
    assert mine.describe_data("train") == "embedded shapes, 40 images of 10 classes"
    assert mine.options.class_names == mine.names and mine.names[0] == "disc"
    kept = recipe(data_path="/gone", class_names=("cat", "dog"))
    assert kept.model().fc.out_features == 2  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"class_names are 2 \(cat …\), the data have 10 \(disc …\)"):
        recipe(class_names=("cat", "dog")).dataset("train")


def test_the_model_is_described_with_its_operations() -> None:
    words = recipe(width=64, img_size=32).describe_model(nn.Identity())
    assert words == "resnet18, small stem, 32 px, 10 classes, 1.11 GFLOPs per image"
    assert "patches of 2" in recipe(model="vit_s").describe_model(nn.Identity())
    assert recipe(model="unet").describe_model(nn.Identity()).startswith("unet, width 2, 16 px, 11 classes")


def test_presets_and_the_example_name_options_that_exist() -> None:
    for preset in VisionRecipe.presets:
        request = parse(VisionRecipe, ["--preset", preset], "test")
        assert request.train.data.global_batch_size
    assert json.dumps(list(VisionRecipe.presets)) == '["laptop", "laptop_seg", "fashion"]'
    recipe().smoke()


def test_bf16_changes_little() -> None:
    mine, indices = recipe(model="resnet18"), [1, 2, 3, 4]
    torch.manual_seed(0)
    network = mine.model().eval()
    batch = collate(mine, indices)
    plain = mine.loss(network, batch, keys(indices)).total
    hardware = parse(VisionRecipe, ["--precision", "bf16", "--device", "cpu"], "test").train.hardware
    with choose(hardware, torch.device("cpu")).autocast:
        half = mine.loss(network, batch, keys(indices)).total
    assert half.dtype == torch.float32 and float(half) == pytest.approx(float(plain), rel=0.02)
