"""The examples of data that are read from shards and by `datasets`: equal on any number of ranks."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from engine import lines, trainer_for
from processes import ROOT
from torch import Tensor

from lockstep import cli
from lockstep.distributed import World
from lockstep.flags import parse


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/streaming/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(world: World, name: str, kind: str, flags: list[str]) -> dict[str, Tensor]:
    recipe = getattr(example(name), kind)
    run = trainer_for(parse(recipe, ["--device", "cpu", "--precision", "fp64", *flags], name), world)
    run.fit()
    return {key: tensor.clone() for key, tensor in run.model.state_dict().items()}


def check(ranks, tmp_path: Path, name: str, kind: str, flags: list[str]) -> list[float]:  # type: ignore[no-untyped-def]
    """Train on one rank and on two, and return the losses of one."""
    words = [*flags, "--data", str(tmp_path / "data"), "--no_tensorboard", "--no_curves", "--log_every", "1"]
    alone = trained(World(), name, kind, [*words, "--out", str(tmp_path / "1")])
    for weights in ranks(2)(trained, name, kind, [*words, "--out", str(tmp_path / "2")]):
        for key, tensor in alone.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-9, atol=1e-12)
    return [line["loss"] for line in lines(tmp_path / "1") if "loss" in line]


def test_tar_shards_train_alike_on_ranks(ranks, tmp_path: Path) -> None:
    recipe = str(ROOT / "examples/streaming/tar_shards.py")
    assert cli._dispatch(["data", recipe, str(tmp_path / "data")]) == 0
    flags = ["--n_steps", "16", "--global_batch_size", "50"]
    losses = check(ranks, tmp_path, "tar_shards", "Shapes", flags)
    assert losses[-1] < losses[0]
    assert [line["epochs_proven"] for line in lines(tmp_path / "2") if "epochs_proven" in line][-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_hugging_face_trains_alike_on_ranks(ranks, tmp_path: Path, streaming: bool) -> None:
    pytest.importorskip("datasets")
    recipe = str(ROOT / "examples/streaming/hf_dataset.py")
    assert cli._dispatch(["data", recipe, str(tmp_path / "data")]) == 0
    flags = ["--n_steps", "20", "--global_batch_size", "50", *["--streaming"] * streaming]
    losses = check(ranks, tmp_path, "hf_dataset", "Sums", flags)
    assert losses[-1] < losses[0]
    proven = [line["epochs_proven"] for line in lines(tmp_path / "2") if "epochs_proven" in line][-1]
    assert proven == (0 if streaming else 2)
