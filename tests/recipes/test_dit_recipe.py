"""The recipe `dit`: the loss by hand, the sampler on fields whose answer is known, the pictures it writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lockstep.loss import Objective
from lockstep.recipes.diffusion.sampling import guided
from lockstep.recipes.dit import DiTRecipe
from lockstep.recipes.dit.model import DiT, Size
from lockstep.recipes.dit.recipe import DiTOptions
from lockstep.registry import find
from lockstep.rng import Rng

SIDE = 8


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def recipe(**options: Any) -> DiTRecipe:
    return DiTRecipe(DiTOptions(**{"model": "DiT-Nano/2", "img_size": SIDE, **options}))


def network(depth: int = 2, registers: int = 0) -> DiT:
    torch.manual_seed(0)
    model = DiT(Size(32, depth, 4), patch=2, side=SIDE, classes=10, registers=registers)
    for parameter in model.parameters():
        if not parameter.detach().any():
            nn.init.normal_(parameter, std=0.2)
    return model


def collate(mine: DiTRecipe, indices: list[int]) -> dict[str, Tensor]:
    train = mine.dataset("train")
    assert train is not None
    items = train.__getitems__(indices)  # type: ignore[attr-defined]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def keys(indices: list[int], epoch: int = 0) -> Rng:
    index = torch.tensor(indices)
    return Rng.of(5, torch.full_like(index, epoch), index)


class Recorder(nn.Module):
    """A model that answers `field(x, t, label)` and remembers what it was asked."""

    def __init__(self, field: Any):
        super().__init__()
        self.field = field
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        self.asked.append((x, t, label))
        return self.field(x, t, label)


def test_the_recipe_is_found_by_name() -> None:
    assert find("dit") is DiTRecipe


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_the_one_computed_by_hand(training: bool) -> None:
    mine = recipe(label_dropout=0.5)
    indices = list(range(24))
    batch, rng = collate(mine, indices), keys(indices)
    model = Recorder(lambda x, t, label: 0.3 * x + t[:, None, None, None]).train(training)
    loss = mine.loss(model, batch, rng)
    ((x_t, t, label),) = model.asked
    x = batch["image"].float() / 255 * 2 - 1
    flip = rng.bernoulli("flip", 0.5)
    drop = rng.bernoulli("drop_label", 0.5)
    assert 0 < flip.sum() < 24 and 0 < drop.sum() < 24
    total = 0.0
    for i in range(24):
        x_i = x[i].flip(2) if training and flip[i] else x[i]
        z_i = rng.normal("noise", 3, SIDE, SIDE)[i]
        t_i = 1 / (1 + np.exp(-float(rng.normal("time")[i])))
        assert int(label[i]) == (10 if training and drop[i] else i % 10)
        torch.testing.assert_close(t[i], torch.tensor(t_i, dtype=torch.float32))
        torch.testing.assert_close(x_t[i], (1 - t_i) * x_i + t_i * z_i)
        total += float((0.3 * ((1 - t_i) * x_i + t_i * z_i) + t_i - (z_i - x_i)).square().sum())
    assert float(loss.total) == pytest.approx(total, rel=1e-4)
    assert type(loss.weight) is int and loss.weight == 24 * 3 * SIDE * SIDE


def test_options_turn_flip_and_dropout_off() -> None:
    mine = recipe(label_dropout=0.0, flip=False)
    indices = list(range(20))
    batch, rng = collate(mine, indices), keys(indices)
    model = Recorder(lambda x, t, label: x).train()
    mine.loss(model, batch, rng)
    mine.loss(model.eval(), batch, rng)
    assert all(torch.equal(a, b) for a, b in zip(*model.asked, strict=True))


def test_flipped_images_stay_in_the_data() -> None:
    """Mirrored, a shape is still one of its class: the mean picture of each class is nearly symmetric."""
    mine = DiTRecipe()
    for k in range(10):
        mean = collate(mine, list(range(k, 4000, 10)))["image"].float().mean((0, 1))
        assert (mean - mean.flip(1)).abs().mean() < 0.05 * (mean.max() - mean.min())


@pytest.mark.usefixtures("float64")
def test_the_loss_of_a_batch_is_the_sum_over_its_samples() -> None:
    mine, model = recipe(), network()
    indices = [3, 17, 4, 4021, 99]
    together = mine.loss(model, collate(mine, indices), keys(indices))
    alone = [mine.loss(model, collate(mine, [i]), keys([i])) for i in indices]
    assert together.total.dtype == torch.float64
    torch.testing.assert_close(sum(loss.total for loss in alone), together.total, rtol=1e-12, atol=0)
    assert sum(loss.weight for loss in alone) == together.weight


def test_the_loss_is_float32_under_autocast() -> None:
    mine, model, indices = recipe(), network(), [1, 2, 3]
    batch, rng = collate(mine, indices), keys(indices)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mine.loss(model, batch, rng)
    assert loss.total.dtype == torch.float32
    assert loss.total.item() == pytest.approx(mine.loss(model, batch, rng).total.item(), rel=0.02)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_objective_compiles_as_one_graph(backend: str) -> None:
    mine, model, indices = recipe(), network(depth=1, registers=2), [1, 2, 3, 4]
    objective = Objective(mine.loss, model, seed=5)
    batch, index = collate(mine, indices), torch.tensor(indices)
    # Without it the CPU's code generator writes the generator's shifts out again at every use, for minutes.
    options = {"realize_opcount_threshold": 8} if backend == "inductor" else None
    torch.compiler.reset()
    try:
        compiled = torch.compile(objective, fullgraph=True, backend=backend, options=options)
        total, weight, _ = compiled(batch, index * 0, index)
        total.backward()
    finally:
        torch.compiler.reset()
    expected, _, _ = objective(batch, index * 0, index)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    assert weight == 4 * 3 * SIDE * SIDE
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("steps", [1, 4, 50])
def test_a_straight_line_is_followed_exactly(steps: int) -> None:
    """With the velocity (x − image) / t of straight lines to one image, any number of steps ends on that image."""
    mine = recipe()
    image = torch.rand(3, SIDE, SIDE) * 2 - 1
    model = Recorder(lambda x, t, label: (x - image) / t[:, None, None, None])
    index = torch.arange(3)
    samples = mine.sample(model, index, keys([0, 1, 2]), cfg=1.0, steps=steps)
    torch.testing.assert_close(samples[:, -1], ((image + 1) / 2).expand(3, -1, -1, -1), rtol=0, atol=1e-5)
    times = torch.stack([t for _, t, _ in model.asked])
    assert times.shape == (steps, 3), "one evaluation per step"
    torch.testing.assert_close(times[:, 0], 1 - torch.arange(steps) / steps)


def test_samples_start_from_their_own_noise_and_class() -> None:
    mine = recipe(sample_steps=3)
    model = Recorder(lambda x, t, label: torch.zeros_like(x))
    index = torch.arange(150)
    samples = mine.sample(model, index, keys(list(range(150))), cfg=1.0, frames=2)
    assert samples.shape == (150, 2, 3, SIDE, SIDE) and samples.min() == 0 and samples.max() == 1
    start = keys(list(range(150))).normal("start", 3, SIDE, SIDE)
    torch.testing.assert_close(samples[:, 1], ((start + 1) / 2).clamp(0, 1))
    assert torch.equal(samples[:, 0], samples[:, 1]), "nothing moved"
    assert torch.equal(torch.cat([label for _, _, label in model.asked[::3]]), index % 10)
    assert max(len(x) for x, _, _ in model.asked) == 64
    part = mine.sample(model, index[70:75], keys(list(range(70, 75))), cfg=1.0, frames=1)
    assert torch.equal(part[:, 0], samples[70:75, -1])


def test_guidance_is_the_formula_in_one_doubled_batch() -> None:
    v_class, v_none = 0.7, 0.2
    model = Recorder(lambda x, t, label: torch.where(label == 10, v_none, v_class)[:, None, None, None] * x)
    x, label = torch.randn(4, 3, SIDE, SIDE), torch.arange(4)
    for cfg in (0.0, 2.5, 5.0):
        torch.testing.assert_close(guided(model, x, 0.5, label, 10, cfg), (v_none + cfg * (v_class - v_none)) * x)
    assert [len(asked[0]) for asked in model.asked] == [8, 8, 8]
    assert torch.equal(guided(model, x, 0.5, label, 10, 1.0), v_class * x)
    assert len(model.asked[-1][0]) == 4, "no guidance, no doubling"


def test_frames_are_evenly_spread_over_the_steps() -> None:
    mine = recipe()
    model = Recorder(lambda x, t, label: torch.full_like(x, -0.2) + 0 * x)
    mine_samples = mine.sample(model, torch.arange(2), keys([0, 1]), cfg=1.0, steps=10, frames=6)
    assert mine_samples.shape[1] == 6
    start = keys([0, 1]).normal("start", 3, SIDE, SIDE)
    for k in range(6):
        torch.testing.assert_close(mine_samples[:, k], ((start + 0.04 * k + 1) / 2).clamp(0, 1))


@pytest.mark.usefixtures("float64")
def test_sampling_works_in_float64_without_gradients() -> None:
    samples = recipe().sample(network(), torch.arange(2), keys([0, 1]), steps=2)
    assert samples.dtype == torch.float64 and not samples.requires_grad


def test_sample_sets_hold_every_class_for_each_guidance() -> None:
    assert recipe().sample_sets() == {
        name: {"n": 100, "cfg": float(name[3:])} for name in ("cfg1.0", "cfg2.5", "cfg5.0")
    }
    mine = recipe(sample_per_class=3)
    mine.smoke()
    assert mine.sample_sets() == {"cfg5.0": {"n": 2, "cfg": 5.0}} and mine.options.sample_steps == 1


def test_the_grid_has_one_class_per_column(tmp_path: Path) -> None:
    mine = recipe()
    shade = torch.arange(20) % 10 * 25 / 255  # sample i has class i % 10
    samples = shade[:, None, None, None, None].expand(20, 3, 3, SIDE, SIDE).clone()
    samples[:, :2] = 1.0
    png, gif = mine.save_samples(samples, tmp_path / "new" / "step100-cfg2.5")
    assert (png.name, gif.name) == ("step100-cfg2.5.png", "step100-cfg2.5.gif")
    picture = np.array(Image.open(png))
    pitch = SIDE * 8 + 2
    assert picture.shape == (2 * pitch + 2, 10 * pitch + 2, 3)
    for i in range(20):
        cell = picture[i // 10 * pitch + 2 : (i // 10 + 1) * pitch, i % 10 * pitch + 2 : (i % 10 + 1) * pitch]
        assert (cell == i % 10 * 25).all()
    assert (picture[:2] == 255).all() and (picture[:, pitch : pitch + 2] == 255).all()
    movie = Image.open(gif)
    movie.seek(movie.n_frames - 1)  # type: ignore[attr-defined]
    assert np.abs(np.array(movie.convert("RGB")).astype(int) - picture).max() <= 8


def test_few_samples_make_a_small_grid(tmp_path: Path) -> None:
    png, _ = recipe().save_samples(torch.rand(3, 1, 3, SIDE, SIDE), tmp_path / "few")
    assert Image.open(png).size == (3 * 66 + 2, 66 + 2)


def test_data_sets_are_made_once_and_described() -> None:
    mine = recipe()
    assert mine.dataset("train") is mine.dataset("train")
    assert mine.describe_data("val") == "embedded shapes, 1,000 images of 10 classes"


def test_a_folder_without_validation_images_has_none(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "only" / "1.png")
    mine = recipe(data_path=str(tmp_path))
    assert mine.dataset("val") is None and mine.describe_data("val") == "" and mine.classes == 1
    assert isinstance(mine.model(), DiT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "DiT-M/2"}, "DiT-S/2"),
        ({"img_size": 30, "model": "DiT-S/4"}, "28 would do"),
        ({"num_register_tokens": -1}, "0 or more, not -1"),
        ({"label_dropout": 1.0}, r"in \[0, 1\), not 1.0"),
        ({"sample_steps": 0}, "at least 1"),
        ({"sample_per_class": 0}, "at least 1"),
        ({"sample_cfg": (1.0, float("nan"))}, "0 or more"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**options)


def test_presets_name_options_that_exist() -> None:
    own = set(DiTOptions.__dataclass_fields__)
    for flags in DiTRecipe.presets.values():
        recipe(**{key: value for key, value in flags.items() if key in own})
        assert flags["n_steps"] > flags["warmup_steps"]
