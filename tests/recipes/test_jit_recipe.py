"""The recipe `jit`: the loss by hand, Heun's steps on models whose answer is known, guidance in its interval."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lockstep.flags import parse
from lockstep.loss import Objective
from lockstep.recipes.jit import JiTRecipe
from lockstep.recipes.jit.model import JiT, Size
from lockstep.recipes.jit.recipe import JiTOptions
from lockstep.registry import find
from lockstep.rng import Rng

SIDE = 8


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def recipe(**options: Any) -> JiTRecipe:
    return JiTRecipe(JiTOptions(**{"model": "JiT-Nano/2", "img_size": SIDE, **options}))


def network() -> JiT:
    torch.manual_seed(0)
    model = JiT(Size(32, 2, 4, 6, 1), patch=2, side=SIDE, classes=10, class_tokens=3)
    for parameter in model.parameters():
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=0.2)
    return model


def collate(mine: JiTRecipe, indices: list[int]) -> dict[str, Tensor]:
    train = mine.dataset("train")
    assert train is not None
    return mine.collate([train[i] for i in indices])


def keys(indices: list[int], epoch: int = 0) -> Rng:
    index = torch.tensor(indices)
    return Rng.of(5, torch.full_like(index, epoch), index)


class Recorder(nn.Module):
    """A model that answers `image(z, t, label)` and remembers what it was asked."""

    def __init__(self, image: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.image = image
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, z: Tensor, t: Tensor, label: Tensor) -> Tensor:
        self.asked.append((z, t, label))
        return self.image(z, t, label)

    @property
    def times(self) -> list[float]:
        return [t[0].item() for _, t, _ in self.asked]


def test_the_recipe_is_found_by_name() -> None:
    assert find("jit") is JiTRecipe


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"noise_scale": 2.0, "time_mean": 3.0, "time_std": 1.5}])
def test_the_loss_is_the_one_computed_by_hand(training: bool, options: dict[str, float]) -> None:
    mine = recipe(label_dropout=0.5, **options)
    indices = list(range(24))
    batch, rng = collate(mine, indices), keys(indices)
    model = Recorder(lambda z, t, label: 0.3 * z + t[:, None, None, None]).train(training)
    loss = mine.loss(model, batch, rng)
    ((z, t, label),) = model.asked
    flip, drop = rng.bernoulli("flip", 0.5), rng.bernoulli("drop_label", 0.5)
    assert 0 < flip.sum() < 24 and 0 < drop.sum() < 24
    total, held = 0.0, 0
    for i in range(24):
        x = batch["image"][i].double() / 255 * 2 - 1
        x = x.flip(2) if training and flip[i] else x
        e = rng.normal("noise", 3, SIDE, SIDE)[i] * options.get("noise_scale", 1.0)
        n = options.get("time_mean", -0.8) + options.get("time_std", 0.8) * rng.normal("time")[i].item()
        t_i = 1 / (1 + math.exp(-n))
        z_i = t_i * x + (1 - t_i) * e
        assert int(label[i]) == (10 if training and drop[i] else i % 10)
        assert t[i].item() == pytest.approx(t_i, rel=1e-12)
        torch.testing.assert_close(z[i], z_i, rtol=1e-12, atol=1e-12)
        total += float(((x - (0.3 * z_i + t_i)) / max(1 - t_i, 0.05)).square().sum())
        held += 1 - t_i < 0.05
    assert bool(held) == bool(options), "some of them are near enough to the image for the weight to be held"
    assert float(loss.total) == pytest.approx(total, rel=1e-10)
    assert type(loss.weight) is int and loss.weight == 24 * 3 * SIDE * SIDE


@pytest.mark.usefixtures("float64")
def test_far_from_the_image_the_loss_is_that_of_the_velocity() -> None:
    """x − e is the velocity of the straight line, and (x̂ − z) / (1 − t) the one predicted."""
    mine, indices = recipe(time_mean=-3.0), list(range(8))
    batch, rng = collate(mine, indices), keys(indices)
    model = Recorder(lambda z, t, label: z.sin()).eval()
    loss = mine.loss(model, batch, rng)
    z, t, _ = model.asked[0]
    x, e = batch["image"] / 127.5 - 1, rng.normal("noise", 3, SIDE, SIDE)
    predicted = (z.sin() - z) / (1 - t[:, None, None, None])
    torch.testing.assert_close(loss.total, (predicted - (x - e)).square().sum(), rtol=1e-10, atol=0)


def test_noise_levels_are_logit_normal() -> None:
    mine, indices = recipe(), list(range(4000))
    model = Recorder(lambda z, t, label: z)
    batch = {"image": torch.zeros(4000, 3, 1, 1, dtype=torch.uint8), "label": torch.zeros(4000, dtype=torch.int64)}
    mine.loss(model, batch, keys(indices))
    logit = model.asked[0][1].logit()
    assert logit.mean().item() == pytest.approx(-0.8, abs=0.05) and logit.std().item() == pytest.approx(0.8, abs=0.04)


def test_noise_grows_with_the_side_above_256() -> None:
    assert [recipe(img_size=side).noise_scale for side in (8, 64, 256, 512, 1024)] == [1, 1, 1, 2, 4]
    assert recipe(img_size=512, noise_scale=1.5).noise_scale == 1.5


@pytest.mark.usefixtures("float64")
def test_the_loss_of_a_batch_is_the_sum_over_its_samples() -> None:
    mine, model = recipe(), network()
    indices = [3, 17, 4, 4021, 99]
    together = mine.loss(model, collate(mine, indices), keys(indices))
    alone = [mine.loss(model, collate(mine, [i]), keys([i])) for i in indices]
    torch.testing.assert_close(sum(loss.total for loss in alone), together.total, rtol=1e-12, atol=0)
    assert sum(loss.weight for loss in alone) == together.weight and together.total.dtype == torch.float64


def test_the_loss_is_float32_under_autocast() -> None:
    mine, model, indices = recipe(), network(), [1, 2, 3]
    batch, rng = collate(mine, indices), keys(indices)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mine.loss(model, batch, rng)
    assert loss.total.dtype == torch.float32
    assert loss.total.item() == pytest.approx(mine.loss(model, batch, rng).total.item(), rel=0.03)


@pytest.mark.slow
def test_the_objective_compiles_as_one_graph() -> None:
    mine, model, indices = recipe(), network(), [1, 2, 3, 4]
    objective = Objective(mine.loss, model, seed=5)
    batch, index = collate(mine, indices), torch.tensor(indices)
    torch.compiler.reset()
    try:
        total, weight, _ = torch.compile(objective, fullgraph=True, backend="aot_eager")(batch, index * 0, index)
        total.backward()
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(total, objective(batch, index * 0, index)[0], rtol=1e-4, atol=1e-4)
    assert weight == 4 * 3 * SIDE * SIDE and all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_a_model_that_knows_the_image_gets_there_whatever_the_steps(steps: int) -> None:
    mine = recipe(noise_scale=1.7)
    image = torch.rand(3, SIDE, SIDE) * 2 - 1
    model = Recorder(lambda z, t, label: image.expand_as(z))
    samples = mine.sample(model, torch.arange(3), keys([0, 1, 2]), cfg=1.0, steps=steps, frames=steps + 1)
    torch.testing.assert_close(samples[:, -1], ((image + 1) / 2).expand(3, -1, -1, -1), rtol=0, atol=1e-5)
    noise = 1.7 * keys([0, 1, 2]).normal("start", 3, SIDE, SIDE)
    for k in range(steps + 1):  # on a straight line all the way
        at = k / steps * image + (1 - k / steps) * noise
        torch.testing.assert_close(samples[:, k], ((at + 1) / 2).clamp(0, 1), rtol=0, atol=1e-5)
    heun = [time for i in range(steps - 1) for time in (i / steps, (i + 1) / steps)]
    assert model.times == pytest.approx([*heun, (steps - 1) / steps]), "two evaluations per step, one in the last"


@pytest.mark.usefixtures("float64")
def test_the_error_falls_with_the_square_of_the_step() -> None:
    """Data that are normal with deviation s: the best guess is known, and so is where a sample ends: at s times it."""
    s = 0.5

    def best(z: Tensor, t: Tensor, label: Tensor) -> Tensor:
        at = t[:, None, None, None]
        return z * at * s**2 / (at**2 * s**2 + (1 - at) ** 2)

    mine = recipe()
    start = keys([0, 1]).normal("start", 3, SIDE, SIDE)
    inside = start.abs() < 1.5  # the rest is clamped
    errors = []
    for steps in (20, 40, 80):
        made = mine.sample(Recorder(best), torch.arange(2), keys([0, 1]), cfg=1.0, steps=steps)[:, -1] * 2 - 1
        errors.append((made - s * start)[inside].abs().max().item())
    assert errors[2] < 1e-3
    assert errors[0] / errors[1] > 3 and errors[1] / errors[2] > 3, errors  # Euler's would halve


def test_guidance_is_the_formula_inside_its_interval_alone() -> None:
    mine = recipe(cfg_interval=(0.25, 0.75))
    model = Recorder(lambda z, t, label: torch.where(label == 10, 0.2, 0.7)[:, None, None, None] * z)
    z, label = torch.randn(4, 3, SIDE, SIDE), torch.arange(4)
    for t, guided in [(0.0, False), (0.25, False), (0.26, True), (0.74, True), (0.75, False), (0.9, False)]:
        model.asked.clear()
        velocity = mine.velocity(model, z, t, label, 3.0)
        of_class, of_none = (0.7 * z - z) / (1 - t), (0.2 * z - z) / (1 - t)
        expected = of_none + (3.0 if guided else 1.0) * (of_class - of_none)
        torch.testing.assert_close(velocity, expected, rtol=1e-5, atol=1e-5)
        assert [len(asked[0]) for asked in model.asked] == [8 if guided else 4], "no guidance, no doubling"


def test_an_interval_from_zero_guides_from_the_start() -> None:
    model = Recorder(lambda z, t, label: z)
    z, label = torch.randn(1, 3, SIDE, SIDE), torch.arange(1)
    recipe(cfg_interval=(0.0, 1.0)).velocity(model, z, 0.0, label, 2.0)
    recipe(cfg_interval=(0.0, 1.0)).velocity(model, z, 0.0, label, 1.0)
    assert [len(asked[0]) for asked in model.asked] == [2, 1]


def test_a_sample_does_not_depend_on_its_company() -> None:
    mine, model = recipe(sample_steps=2), network()
    whole = mine.sample(model, torch.arange(70), keys(list(range(70))), cfg=2.0, frames=2)
    assert whole.shape == (70, 2, 3, SIDE, SIDE) and whole.min() >= 0 and whole.max() <= 1
    part = mine.sample(model, torch.arange(63, 68), keys(list(range(63, 68))), cfg=2.0, frames=1)
    torch.testing.assert_close(part[:, 0], whole[63:68, -1], rtol=0, atol=1e-5)
    recorder = Recorder(lambda z, t, label: z)
    mine.sample(recorder, torch.arange(70), keys(list(range(70))), cfg=1.0, steps=1)
    assert torch.equal(torch.cat([label for _, _, label in recorder.asked]), torch.arange(70) % 10)
    assert max(len(z) for z, _, _ in recorder.asked) == 64


def test_sample_sets_stay_small(tmp_path: Path) -> None:
    assert recipe().sample_sets() == {name: {"n": 100, "cfg": float(name[3:])} for name in ("cfg1.0", "cfg2.9")}
    for k in range(30):
        (tmp_path / f"class{k}").mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / f"class{k}" / "1.png")
    mine = recipe(data_path=str(tmp_path))
    assert mine.classes == 30 and mine.sample_sets()["cfg1.0"]["n"] == 100
    model = mine.model()
    assert isinstance(model, JiT) and model.none == 30 and model.label.num_embeddings == 31


def test_a_try_out_is_small_and_says_so() -> None:
    mine = JiTRecipe()
    mine.smoke()
    assert mine.options.sample_steps == 1 and mine.sample_sets() == {"cfg2.9": {"n": 2, "cfg": 2.9}}
    with torch.device("meta"):
        model = mine.model()
    assert isinstance(model, JiT) and len(model.blocks) == 2 and model.start == 1
    blocks, tokens = "2 of 12 blocks", "256 patches and 32 class tokens"
    assert mine.describe_model(model) == f"JiT-B/4, {blocks}, {tokens}, 64 pixels per side"


def test_samples_are_written_as_a_grid_and_a_film(tmp_path: Path) -> None:
    png, gif = recipe().save_samples(torch.rand(20, 3, 3, SIDE, SIDE), tmp_path / "step100-cfg2.9")
    assert (png.name, gif.name) == ("step100-cfg2.9.png", "step100-cfg2.9.gif")
    assert Image.open(png).size == (10 * 66 + 2, 2 * 66 + 2)
    assert Image.open(gif).n_frames == 3  # type: ignore[attr-defined]


def test_the_defaults_are_the_published_ones() -> None:
    request = parse(JiTRecipe, [], "test")
    optim, data = request.train.optim, request.train.data
    assert (optim.lr, optim.beta1, optim.beta2, optim.weight_decay) == (5e-5, 0.9, 0.95, 0.0)
    assert (optim.lr_scaling, optim.base_batch_size, optim.warmup_epochs) == ("none", 256, 5)
    assert optim.ema_decay == (0.9999, 0.9996) and (data.batch_size, data.epochs) == (64, 100)
    assert request.options.label_dropout == 0.1 and request.options.cfg_interval == (0.1, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "JiT-M/2"}, "as in JiT-B/16, not 'JiT-M/2'"),
        ({"img_size": 30, "model": "JiT-S/4"}, "28 would do"),
        ({"img_size": 4, "model": "JiT-S/16"}, "16 would do"),
        ({"class_tokens": -1}, "0 or more, not -1; 32 is usual"),
        ({"depth": 0}, "at least 1, not 0; 4 is usual"),
        ({"dropout": 1.0}, r"in \[0, 1\), not 1.0"),
        ({"label_dropout": 1.0}, r"in \[0, 1\), not 1.0"),
        ({"noise_scale": 0.0}, "more than 0, not 0.0"),
        ({"time_mean": math.nan}, "a number, not nan"),
        ({"time_std": 0.0}, "more than 0, not 0.0"),
        ({"cfg_interval": (0.5, 0.5)}, "two rising times"),
        ({"cfg_interval": (0.5, 1.5)}, "two rising times"),
        ({"sample_steps": 0}, "at least 1, not 0"),
        ({"sample_per_class": 0}, "at least 1, not 0"),
        ({"sample_cfg": (1.0, math.inf)}, "0 or more, not inf"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**options)
