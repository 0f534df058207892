"""`lockstep export`: what other programs read is what was trained."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from processes import ROOT
from torch import Tensor

from lockstep import checkpoint, cli

RECIPE = """
import tiny

class Mine(tiny.Plain):
    name = "mine"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "mine.py").write_text(RECIPE)
    words = ["--n_steps", "4", "--device", "cpu", "--ema_decay", "0.5", "0.9", "--out", str(folder / "run")]
    assert cli._dispatch(["train", str(folder / "mine.py"), *words]) == 0
    return folder / "run"


def weights(run: Path, name: str) -> dict[str, Tensor]:
    return checkpoint.load(run / "checkpoints/step-00000004").tensors[name]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("flags", "name", "words"), [([], "model", "plain"), (["--ema"], "ema-0.5", "averaged")])
def test_safetensors_and_dcp_hold_the_weights_asked_for(
    run: Path, capsys: pytest.CaptureFixture[str], flags: list[str], name: str, words: str
) -> None:
    expected = weights(run, name)
    assert cli._dispatch(["export", str(run), "--to", "safetensors", *flags]) == 0
    assert capsys.readouterr().out == f"{words} weights of step 4:\n{run}/export/safetensors\n"
    assert same(safetensors.torch.load_file(run / "export/safetensors/model.safetensors"), expected)
    assert cli._dispatch(["export", str(run), "--to", "dcp", *flags]) == 0
    found = {"model": {key: torch.empty_like(tensor) for key, tensor in expected.items()}}
    dcp.load(found, checkpoint_id=run / "export/dcp")
    assert same(found["model"], expected)


def test_what_is_not_there_is_said(run: Path) -> None:
    with pytest.raises(
        ValueError, match=r"0 parts with save_pretrained\(\), which --to hf needs: use --to safetensors"
    ):
        cli._dispatch(["export", str(run), "--to", "hf"])
    with pytest.raises(ValueError, match="say which run: lockstep export RUN"):
        cli._dispatch(["export", "--to", "hf"])


@pytest.mark.slow
def test_a_fine_tuned_model_is_loaded_by_from_pretrained_and_fine_tuned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe, run = str(ROOT / "examples/huggingface/finetune.py"), tmp_path / "run"
    words = ["--n_steps", "3", "--batch_size", "4", "--length", "16", "--device", "cpu", "--no_tensorboard"]
    assert cli._dispatch(["train", recipe, *words, "--ema_decay", "0.9", "--out", str(run)]) == 0
    assert cli._dispatch(["export", str(run), "--to", "hf", "--ema", "--out", str(tmp_path / "hf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    averaged = checkpoint.load(run / "checkpoints/step-00000003").tensors["ema-0.9"]
    assert same(dict(model.state_dict()), averaged)
    again = ["train", recipe, *words, "--weights", str(tmp_path / "hf"), "--lr", "0", "--out", str(tmp_path / "again")]
    assert cli._dispatch(again) == 0
    assert same(checkpoint.load(tmp_path / "again/checkpoints/step-00000003").tensors["model"], averaged)
