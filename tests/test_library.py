"""Lockstep as a library: what importing it loads, and training without the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from engine import train

import lockstep
from lockstep.config import Data, Optim, Run
from lockstep.distributed import World
from lockstep.outcome import Diverged


def test_importing_lockstep_loads_neither_the_command_line_nor_the_audit_nor_the_compiler() -> None:
    code = "import sys; from lockstep import Trainer; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "lockstep.trainer" in loaded
    unwanted = (
        "lockstep.cli",
        "lockstep.commands",
        "lockstep.audit",
        "lockstep.recipes",
        "torch._dynamo",
        "matplotlib",
    )
    assert not {name for name in unwanted if name in loaded}


def test_fit_trains_and_returns_the_model_metrics_and_folder(tmp_path: Path) -> None:
    outcome = lockstep.fit(tiny.Plain, n_steps=12, device="cpu", out=str(tmp_path / "a"))
    assert (outcome.step, outcome.folder, outcome.stopped_by) == (12, tmp_path / "a", None)
    assert outcome.metrics["loss"] > 0
    expected = train(World(), "Plain", ["--n_steps", "12", "--out", str(tmp_path / "b")])
    for name, tensor in outcome.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_fit_takes_a_whole_config_and_an_instance_with_options(tmp_path: Path) -> None:
    run = Run(out=str(tmp_path / "run"), tensorboard=False, curves=False)
    config = lockstep.TrainConfig(data=Data(n_steps=3, batch_size=4), optim=Optim(lr=1e-3), run=run)
    recipe = tiny.Plain(tiny.Options(width=5))
    outcome = lockstep.fit(recipe, config)
    assert outcome.step == 3 and outcome.model[0].weight.shape == (5, 6)  # type: ignore[index]
    with pytest.raises(ValueError, match="a config or single settings, not both: lr"):
        lockstep.fit(recipe, config, lr=1.0)


def test_fit_raises_and_never_exits(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    with pytest.raises(ValueError, match="did you mean 'n_steps'"):
        lockstep.fit(tiny.Plain, n_stepps=3, out=out)
    with pytest.raises(ValueError, match=r"Error parsing --n_steps.*many"):
        lockstep.fit(tiny.Plain, n_steps="many", out=out)
    with pytest.raises(ValueError, match="batch_size is at least 1"):
        lockstep.fit(tiny.Plain, batch_size=0, out=out)
    with pytest.raises(ValueError, match="torchrun --nproc_per_node=2"):
        lockstep.fit(tiny.Plain, nproc="2", out=out)
    with pytest.raises(Diverged):
        lockstep.fit(tiny.Tiny, poison_from=0, max_bad_steps=3, device="cpu", out=out)


def test_fit_restores_the_default_dtype(tmp_path: Path) -> None:
    lockstep.fit(tiny.Plain, n_steps=2, precision="fp64", device="cpu", out=str(tmp_path / "run"))
    assert torch.get_default_dtype() == torch.float32


def test_a_method_of_a_capability_needs_the_capability() -> None:
    with pytest.raises(TypeError, match=r"class Mine\(Recipe, Predicts\)"):

        class Mine(tiny.Plain):
            def predict_batch(self, model, batch):  # type: ignore[no-untyped-def]
                return []


def test_a_capability_is_implemented_whole() -> None:
    class Mine(tiny.Plain, lockstep.Predicts):
        def predict_batch(self, model, batch):  # type: ignore[no-untyped-def]
            return []

    with pytest.raises(TypeError, match="predict_dataset"):
        Mine()  # type: ignore[abstract]


def test_fit_trains_the_very_instance(tmp_path: Path) -> None:
    class Given(tiny.Plain):
        def __init__(self, points: int):
            super().__init__()
            self.points = points

        def dataset(self, split: str) -> tiny.Points:
            return tiny.Points(self.points)

    outcome = lockstep.fit(Given(40), n_steps=5, batch_size=8, device="cpu", out=str(tmp_path / "run"))
    assert outcome.step == 5 and "5 steps = 1.00 epochs" in (tmp_path / "run/receipt.json").read_text()


def test_fit_resumes_the_newest_run_with_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = lockstep.fit(tiny.Plain, n_steps=4, lr=0.5, device="cpu")
    again = lockstep.fit(tiny.Plain, n_steps=6, resume="auto", device="cpu")
    assert again.folder == first.folder and again.step == 6
    assert "0.5, constant" in (again.folder / "receipt.json").read_text()


def test_an_exact_fit_leaves_the_settings_of_torch_as_they_were(tmp_path: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.backends.cudnn.benchmark
    lockstep.fit(tiny.Tiny, n_steps=2, exact=True, batch_size=4, global_batch_size=8, out=str(tmp_path / "run"))
    assert before == (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
    )
