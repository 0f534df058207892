"""`lockstep replay`: a step done again has the bits of the run, on any number of ranks, and shows its samples."""

import json
import math
import shutil
from pathlib import Path

import pytest
import tiny
from engine import trainer, trainer_for
from PIL import Image

from lockstep import registry
from lockstep.commands.replay import run as replay_command
from lockstep.distributed import World
from lockstep.flags import parse
from lockstep.replay import Replay, Run, SampleLoss, sample_losses

pytestmark = pytest.mark.slow

TILED = ["--exact", "--batch_size", "4", "--global_batch_size", "28", "--history_every", "4", "--save_every", "5"]


def train(world: World, recipe: str, flags: list[str]) -> None:
    trainer(world, recipe, flags).fit()


def redone(world: World, recipe: str, folder: Path, step: int, until: int) -> tuple[list[str] | None, list[SampleLoss]]:
    """What differs from the recorded bits at `until`, and the samples of `step`."""
    found = registry.register(getattr(tiny, recipe), recipe.lower(), f"{tiny.__file__}:{recipe}")
    replay = Replay(Run.open(folder, found, step), step, world, folder)
    replay.advance(step - 1)
    samples = sample_losses(replay.trainer)
    replay.advance(until)
    return replay.differences(until) if world.is_main else None, samples


@pytest.mark.parametrize("recipe", ["Terms", "WithBatchNorm"])
def test_a_step_has_the_same_bits_on_any_number_of_ranks(ranks, tmp_path: Path, recipe: str) -> None:
    ranks(2)(train, recipe, [*TILED, "--n_steps", "12", "--out", str(tmp_path)])
    alone = redone(World(), recipe, tmp_path, 7, 8)
    assert alone[0] == [] and len(alone[1]) == 28
    (differences, samples), *_ = ranks(3)(redone, recipe, tmp_path, 7, 8)
    assert differences == [] and samples == alone[1]


def test_without_a_checkpoint_it_starts_from_the_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(World(), "Tiny", [*TILED, "--n_steps", "12", "--out", str(tmp_path)])
    shutil.rmtree(tmp_path / "checkpoints/step-00000005")
    assert replay_command([str(tmp_path), "--step", "8", "--recipe", f"{tiny.__file__}:Tiny"]) == 0
    shown = capsys.readouterr().out
    assert "note: no checkpoint before step 8 (there are: 10, 12; --keep leaves more)\n" in shown
    assert "step 8 of" in shown and "on 1 rank: 8 steps from the beginning\n" in shown
    assert "the same bits as the run: loss, gradient, weights of step 8\n" in shown
    assert not (tmp_path / "replay").exists(), "nothing was asked for"


def test_another_data_set_is_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(World(), "Tiny", [*TILED, "--n_steps", "8", "--out", str(tmp_path)])
    other = f"{Path(__file__).parent / 'spiked.py'}:Spiked"
    assert replay_command([str(tmp_path), "--step", "7", "--recipe", other]) == 1
    assert "NOT the bits of the run: loss, gradient, weights of step 8, the first from" in capsys.readouterr().out


def test_a_spike_is_explained_by_its_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{Path(__file__).parent / 'spiked.py'}:Spiked"
    found = registry.find(spec)
    made = trainer_for(
        parse(found, ["--device", "cpu", *TILED, "--n_steps", "8", "--out", str(tmp_path)], "t"), World()
    )
    made.fit()
    order = made.step.stream.positions(0, 8 * 28).index.tolist()
    step = order.index(found.bad_sample) // 28 + 1
    words = [str(tmp_path), "--step", str(step), "--samples", "--recipe", spec]
    assert replay_command([*words, "--show", "7"]) == 0
    samples = json.loads((tmp_path / f"replay/step-{step:08d}.json").read_text())
    assert samples[0]["index"] == found.bad_sample and samples[0]["share"] > 0.99 and len(samples) == 28
    assert [s["loss"] for s in samples] == sorted((s["loss"] for s in samples), reverse=True)
    shown = capsys.readouterr().out
    assert (
        f" {found.bad_sample} " in shown
        and "[1000]" in shown
        and "the 7 largest losses of 28 samples, each alone" in shown
    )
    with Image.open(tmp_path / f"replay/step-{step:08d}.png") as sheet:
        first, second = (sheet.convert("L").getpixel((x, 50)) for x in (90, 260))
        assert sheet.width > 5 * 160 and sheet.height > 2 * 160 and first == 255 and second < 50
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write to .*file: File exists; choose another --out"):
        replay_command([*words, "--out", str(tmp_path / "file")])


def test_a_gradient_norm_in_fp16_is_that_of_fp32(tmp_path: Path) -> None:
    norms = []
    for precision in ("fp32", "fp16"):
        flags = [*TILED, "--n_steps", "3", "--save_every", "2", "--precision", precision]
        train(World(), "Tiny", [*flags, "--out", str(tmp_path / precision)])
        samples = redone(World(), "Tiny", tmp_path / precision, 3, 3)[1]
        norms.append([s.gradient_norm for s in sorted(samples, key=lambda s: s.index)])
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.parametrize("recipe", ["Tiny", "Terms"])
def test_the_loss_of_a_step_is_the_mean_over_its_samples(tmp_path: Path, recipe: str) -> None:
    train(World(), recipe, [*TILED, "--n_steps", "8", "--out", str(tmp_path), "--history_every", "1"])
    line = json.loads((tmp_path / "history.jsonl").read_text().splitlines()[7])
    _, samples = redone(World(), recipe, tmp_path, 7, 7)
    assert math.isclose(sum(s.loss for s in samples) / 28, line["loss"], rel_tol=1e-5)
    assert math.isclose(sum(s.share for s in samples), 1.0, rel_tol=1e-9)


def test_a_run_that_is_not_exact_is_replayed_without_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(World(), "Tiny", ["--n_steps", "6", "--save_every", "2", "--log_every", "1", "--out", str(tmp_path)])
    assert replay_command([str(tmp_path), "--step", "5", "--samples", "--recipe", f"{tiny.__file__}:Tiny"]) == 0
    shown = capsys.readouterr().out
    assert "1 step from step-00000004" in shown and "the run is not exact, so there are no digests" in shown
    logged = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (loss,) = [row["loss"] for row in logged if row["step"] == 5 and "loss" in row]
    assert f"loss {loss:.6g}," in shown and f"the run has logged a loss of {loss:.6g} at step 5\n" in shown


def test_a_step_is_redone_with_the_settings_of_its_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TILED, "--schedule", "cosine", "--resume", "auto", "--save_every", "3", "--out", str(tmp_path)]
    train(World(), "Tiny", [*flags, "--n_steps", "6"])
    train(World(), "Tiny", [*flags, "--n_steps", "12"])

    def replay(step: int) -> tuple[int, str]:
        capsys.readouterr()
        return replay_command([str(tmp_path), "--step", str(step), "--recipe", f"{tiny.__file__}:Tiny"]), (
            capsys.readouterr().out
        )

    assert [replay(step)[0] for step in (2, 5, 8)] == [0, 0, 0]
    shutil.rmtree(tmp_path / "checkpoints/step-00000006")
    status, shown = replay(7)
    assert status == 1 and "note: the run had other settings (n_steps) at step 1; those of step 7 are used" in shown


def test_a_step_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    train(World(), "Tiny", ["--n_steps", "3", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="has 3 steps; there is no step 4"):
        replay_command([str(tmp_path), "--step", "4", "--recipe", f"{tiny.__file__}:Tiny"])
    with pytest.raises(SystemExit):
        replay_command([str(tmp_path), "--step", "0"])
    with pytest.raises(ValueError, match="say which run"):
        replay_command(["--step", "1"])
