"""The engine in one process: what does not need ranks."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from engine import lines, train, trainer
from safetensors.torch import load_file

from lockstep import checkpoint
from lockstep.distributed import World
from lockstep.outcome import NotSaved

PACKAGE = Path(sys.modules["lockstep"].__file__).parent  # type: ignore[arg-type]


def functions_called(act: Callable[[], object]) -> set[tuple[str, str]]:
    """The (file, function) pairs of the package that run, without a recipe's side: its code, its keys of randomness."""
    seen: set[tuple[str, str]] = set()
    not_counted = {"Objective.forward", "Recipe.collate", "Rng.of", "mix_words"}

    def profile(frame, event, _):  # type: ignore[no-untyped-def]
        code, caller = frame.f_code, frame
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
            return
        while caller is not None and caller.f_code.co_qualname not in not_counted:
            if caller.f_code.co_filename == tiny.__file__:
                return
            caller = caller.f_back
        if caller is None:
            seen.add((Path(code.co_filename).name, code.co_qualname))

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("recipe", ["Labelled", "Terms", "Uneven", "Augmented"])
def test_a_step_runs_through_few_files_and_functions(tmp_path: Path, recipe: str, accumulation: int) -> None:
    """Whatever kind of recipe; what runs in a loader process is counted too (here it is this process)."""
    flags = ["--ema_decay", "0.99", "--clip_grad", "1", "--num_workers", "0"]
    flags += ["--gradient_accumulation_steps", str(accumulation), "--out", str(tmp_path / "run")]
    run = trainer(World(), recipe, flags)
    run.train_step()  # the order of the first epoch is made
    seen = functions_called(run.step.run)
    files = {file for file, _ in seen}
    assert {"step.py", "loader.py", "stream.py", "optim.py", "loss.py", "distributed.py"} <= files
    assert len(files) <= 6, sorted(files)
    assert len(seen) <= 20, sorted(seen)


def test_the_loss_is_the_mean_over_the_elements_of_the_global_batch(tmp_path: Path) -> None:
    """Micro-batches with different numbers of labels: a mean of means would be wrong."""
    flags = ["--global_batch_size", "24", "--n_steps", "10", "--precision", "fp64", "--log_every", "1"]
    weights = [
        train(World(), "Labelled", [*flags, "--batch_size", str(micro), "--out", str(tmp_path / str(micro))])
        for micro in (24, 8, 5)
    ]
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-11, atol=1e-13)
    curves = [[line["loss"] for line in lines(tmp_path / str(micro)) if "loss" in line] for micro in (24, 8, 5)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-12) and curves[0] == pytest.approx(curves[2], rel=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
def test_every_precision_learns(tmp_path: Path, precision: str) -> None:
    out = tmp_path / "run"
    train(World(), "Plain", ["--precision", precision, "--n_steps", "150", "--log_every", "10", "--out", str(out)])
    losses = [line["loss"] for line in lines(out) if "loss" in line]
    assert losses[-1] < 0.5 * losses[0], losses


def test_an_overflow_in_fp16_halves_the_scale_and_changes_nothing_else(tmp_path: Path) -> None:
    run = trainer(World(), "Plain", ["--precision", "fp16", "--n_steps", "4", "--out", str(tmp_path / "run")])
    assert run.precision.scaler is not None
    run.precision.scaler.scale.fill_(2.0**40)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train_step()
    assert run.precision.scaler.scale.item() == 2.0**39
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    run.precision.scaler.scale.fill_(2.0**10)
    run.train_step()
    assert not all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())


def test_a_first_step_that_is_skipped_leaves_momentum_at_zero(tmp_path: Path) -> None:
    run = trainer(
        World(),
        "Tiny",
        ["--optimizer", "sgd", "--poison_from", "0", "--poison_to", "1", "--out", str(tmp_path / "run")],
    )
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.train()
    run.train_step()
    assert all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
    run.train_step()
    assert all((tensor - before[name]).abs().max() < 1 for name, tensor in run.model.state_dict().items())


def test_a_failed_last_save_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    run = trainer(World(), "Tiny", ["--n_steps", "2", "--out", str(tmp_path / "run")])
    monkeypatch.setattr(checkpoint, "_fill", full)
    with pytest.raises(NotSaved, match=r"after step 2 could not be saved: .*No space left"):
        run.fit()


def test_an_old_checkpoint_that_cannot_be_deleted_is_said_and_no_failed_run(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    run = trainer(World(), "Tiny", ["--n_steps", "2", "--out", str(tmp_path / "run")])
    monkeypatch.setattr(checkpoint.Checkpoints, "_delete_old", refuse)
    assert run.fit().step == 2
    assert "deleting old checkpoints after step 2" in (tmp_path / "run" / "log.txt").read_text()


def test_a_full_disk_does_not_stop_the_loop(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = trainer(World(), "Tiny", ["--n_steps", "4", "--out", str(out)])
    (out / "log.txt").symlink_to("/dev/full")
    run.say("something")
    run.fit()
    assert (out / "model.pth").exists()


def test_golden_losses_of_tiny_do_not_depend_on_when_they_are_logged(tmp_path: Path) -> None:
    often, rarely = tmp_path / "a", tmp_path / "b"
    train(World(), "Tiny", ["--n_steps", "10", "--log_every", "1", "--out", str(often)])
    train(World(), "Tiny", ["--n_steps", "10", "--log_every", "10", "--out", str(rarely)])
    each = [line["loss"] for line in lines(often) if "loss" in line]
    (mean,) = [line["loss"] for line in lines(rarely) if "loss" in line]
    assert sum(each) / 10 == pytest.approx(mean, rel=1e-6)


def test_patience_stops_the_run_and_the_best_checkpoint_stays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--n_steps", "400", "--eval_every", "5", "--patience", "2", "--min_delta", "1e9", "--keep", "1"]
    run = trainer(World(), "Plain", [*flags, "--out", str(out)])
    outcome = run.fit()
    assert (outcome.stopped_by, outcome.step) == ("patience", 15)
    assert (out / "checkpoints" / "best").resolve().name == "step-00000005"
    assert (out / "model.safetensors").exists()


def test_a_plateau_lowers_the_rate_and_is_remembered(tmp_path: Path) -> None:
    flags = ["--schedule", "plateau", "--decay_patience", "2", "--decay_factor", "0.5", "--min_delta", "1e9"]
    flags += ["--lr", "0.008", "--eval_every", "1", "--save_every", "5", "--log_every", "1", "--out", str(tmp_path)]
    trainer(World(), "Plain", [*flags, "--n_steps", "7"]).fit()
    rates = [line["lr"] for line in lines(tmp_path) if "lr" in line]
    # The first evaluation is the best, the others bring nothing; a drop counts from the next step.
    assert rates == pytest.approx([0.008, 0.008, 0.008, 0.004, 0.004, 0.002, 0.002])
    assert trainer(World(), "Plain", ["--resume", str(tmp_path), "--n_steps", "9"]).update.schedule.drops == 3


def test_a_plateau_without_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs --eval_every"):
        trainer(World(), "Plain", ["--schedule", "plateau", "--out", str(tmp_path)])


def test_a_weight_that_is_no_count_of_samples_is_refused(tmp_path: Path) -> None:
    run = trainer(World(), "Plain", ["--out", str(tmp_path)])
    total = torch.ones((), requires_grad=True)
    run.step.normalizer.scale(total, 24, 0, 8)
    run.step.normalizer.scale(total, 9, 0, 3)
    with pytest.raises(ValueError, match="return it as a tensor"):
        run.step.normalizer.scale(total, 20, 0, 8)


def test_a_folder_deleted_while_running_is_made_again(tmp_path: Path) -> None:
    """What was in it is gone, but the run goes on, saves into it and ends well."""
    out = tmp_path / "run"
    run = trainer(World(), "Tiny", ["--n_steps", "30", "--save_every", "5", "--log_every", "2", "--out", str(out)])
    step = run.train_step

    def deleted_at_12() -> None:
        step()
        if run.progress.step == 12:
            out.rename(tmp_path / "gone")  # at once: a write in the background may be adding files to it

    run.train_step = deleted_at_12  # type: ignore[method-assign]
    outcome = run.fit()
    assert outcome.step == 30 and (out / "model.pth").exists()
    assert checkpoint.newest(out / "checkpoints", print).step == 30  # type: ignore[union-attr]


def test_a_disk_that_is_full_for_a_while_costs_only_what_was_due_then(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "run"
    run = trainer(World(), "Tiny", ["--n_steps", "20", "--save_every", "5", "--log_every", "1", "--out", str(out)])
    write = checkpoint._fill

    def full(folder: Path, *rest: Any) -> None:
        if run.progress.step in range(9, 13):
            raise OSError(28, "No space left on device")
        write(folder, *rest)

    monkeypatch.setattr(checkpoint, "_fill", full)
    step = run.train_step

    def after_the_write() -> None:
        step()
        run.checkpoints.wait()

    run.train_step = after_the_write  # type: ignore[method-assign]
    run.fit()
    kept = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert kept == ["step-00000005", "step-00000015", "step-00000020"]
    assert "saving step 10" in (out / "log.txt").read_text()


def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    flags = ["--ema_decay", "0.9", "--schedule", "cosine", "--warmup_steps", "3"]
    expected = train(World(), "WithDropout", [*flags, "--n_steps", "12", "--out", whole])
    cut = trainer(World(), "WithDropout", [*flags, "--n_steps", "12", "--save_every", "7", "--out", parts])
    cut._open_trackers()
    cut.model.train()
    for _ in range(7):
        cut.train_step()
        cut.progress.step += 1
    cut._save()
    cut.checkpoints.wait()
    resumed = train(World(), "WithDropout", ["--resume", parts])  # the run's own settings hold
    for name, tensor in expected.items():
        assert torch.equal(resumed[name], tensor), name
    ends = [Path(folder) / "checkpoints" / "step-00000012" for folder in (whole, parts)]
    for file in ("model.safetensors", "ema-0.9.safetensors", "optimizer.safetensors"):
        assert (ends[0] / file).read_bytes() == (ends[1] / file).read_bytes(), file


def test_the_weights_are_written_as_plain_files(tmp_path: Path) -> None:
    out = tmp_path / "run"
    weights = train(World(), "Tiny", ["--n_steps", "3", "--ema_decay", "0.9", "0.05", "--out", str(out)])
    model = tiny.Tiny().model()
    model.load_state_dict(torch.load(out / "model.pth", weights_only=True))
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert (out / "config.yaml").exists()
    files = ("model.safetensors", "model_ema.safetensors", "model_ema-0.05.safetensors")
    plain, *averages = (load_file(out / name) for name in files)
    assert plain.keys() == weights.keys() and all(torch.equal(weights[name], plain[name]) for name in plain)
    for average in averages:  # after three steps they lag behind
        assert average.keys() == weights.keys()
        assert not any(torch.equal(weights[name], average[name]) for name in average)
    assert not any(torch.equal(averages[0][name], averages[1][name]) for name in plain)


def test_a_tracker_that_cannot_start_does_not_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    flags = ["--n_steps", "3", "--tensorboard", "--logdir", str(blocked / "log"), "--out", str(out)]
    train(World(), "Tiny", flags)
    assert (out / "model.pth").exists()
    assert "TensorBoard is off" in (out / "log.txt").read_text()


def test_compiled_equals_eager(tmp_path: Path) -> None:
    flags = ["--n_steps", "4", "--precision", "fp64"]
    eager = train(World(), "Tiny", [*flags, "--compile", "off", "--out", str(tmp_path / "a")])
    compiled = train(World(), "Tiny", [*flags, "--compile", "on", "--out", str(tmp_path / "b")])
    for name, tensor in eager.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-9, atol=1e-12)


def test_what_a_loss_logs_reaches_console_and_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(World(), "Tiny", ["--n_steps", "5", "--eval_every", "5", "--out", str(tmp_path)])
    validated = next(line for line in lines(tmp_path) if "val/loss" in line)
    assert 0 < validated["val/loss"] < 1.5 and 0 < validated["val/absolute"] < 1.5
    shown = capsys.readouterr().out
    assert "  absolute " in shown and "  val/absolute " in shown


def test_log_txt_always_exists(tmp_path: Path) -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", str(tmp_path), "--momentum", "0.5"])
    log = (tmp_path / "log.txt").read_text()
    assert "step 0 of 2, 1 rank(s)" in log and "note: momentum has no effect: the optimizer is adamw" in log
