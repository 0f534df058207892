"""Where runs go, what is resumed, and the receipt."""

import errno
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
import torch
from engine import lines, train, trainer

from lockstep.checkpoint import load
from lockstep.config import TrainConfig
from lockstep.distributed import World
from lockstep.flags import parse
from lockstep.outcome import NotSaved
from lockstep.rundir import RunDir, find_config, resolve_run_dir


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_dir(*flags: str) -> RunDir:
    return resolve_run_dir(parse(tiny.Tiny, flags, "test").train.run, "tiny", World())


def test_by_default_a_run_gets_a_new_folder_under_its_recipes_name() -> None:
    first, second = run_dir(), run_dir()
    assert first.path.parent == Path("runs/tiny") and first.path != second.path
    assert first.resume_from is None


def test_runs_that_start_in_one_moment_have_folders_of_their_own() -> None:
    request = parse(tiny.Tiny, [], "test")
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: resolve_run_dir(request.train.run, "tiny", World()).path, range(24)))
    assert len(set(folders)) == 24 and all(folder.is_dir() for folder in folders)


def test_a_folder_with_another_run_is_not_touched() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    before = sorted(p.stat().st_mtime_ns for p in Path("here").rglob("*"))
    with pytest.raises(ValueError, match="holds a run already; go on with it by --resume auto"):
        run_dir("--out", "here")
    assert sorted(p.stat().st_mtime_ns for p in Path("here").rglob("*")) == before


def test_a_folder_with_other_things_in_it_is_fine() -> None:
    Path("here").mkdir()
    Path("here/notes.txt").write_text("mine")
    assert run_dir("--save_dir", "here").path == Path("here")


def test_an_unwritable_folder_is_found_before_the_first_step() -> None:
    Path("file").write_text("")
    with pytest.raises(ValueError, match="cannot write to file/run"):
        run_dir("--out", "file/run")


def test_resume_auto_starts_if_there_is_nothing_and_goes_on_if_there_is() -> None:
    assert run_dir("--resume", "auto", "--out", "here").resume_from is None
    train(World(), "Tiny", ["--n_steps", "4", "--save_every", "2", "--resume", "auto", "--out", "here"])
    assert run_dir("--resume", "auto", "--out", "here").resume_from == Path("here/checkpoints/step-00000004")
    assert run_dir("--resume", "here").resume_from == Path("here/checkpoints/step-00000004")
    assert run_dir("--resume", "here").path == Path("here")


def test_resume_latest_finds_the_newest_run_and_wants_one() -> None:
    with pytest.raises(ValueError, match="no good checkpoint"):
        run_dir("--resume", "latest")
    train(World(), "Tiny", ["--n_steps", "2"])
    (run,) = Path("runs/tiny").iterdir()
    assert run_dir("--resume", "latest").path == run


def test_resume_from_the_middle_branches_off() -> None:
    train(World(), "Tiny", ["--n_steps", "4", "--save_every", "2", "--out", "here"])
    branch = run_dir("--resume", "here/checkpoints/step-00000002")
    assert branch.path != Path("here") and branch.resume_from == Path("here/checkpoints/step-00000002")


def test_a_resumed_run_never_goes_into_the_folder_of_another() -> None:
    train(World(), "Tiny", ["--n_steps", "4", "--save_every", "2", "--out", "here"])
    train(World(), "Tiny", ["--n_steps", "2", "--out", "there"])
    for start in ("here", "here/checkpoints/step-00000002"):
        with pytest.raises(ValueError, match="there holds a run already"):
            run_dir("--resume", start, "--out", "there")
    assert run_dir("--resume", "here/checkpoints/last").path == Path("here")


@pytest.mark.parametrize("flags", [["--resume", "auto"], ["--resume", "latest"]])
def test_the_settings_of_the_newest_run_hold_when_it_is_resumed(flags: list[str]) -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--lr", "0.5", "--seed", "7"])
    got = parse(tiny.Tiny, flags, "test", find_config).train
    assert (got.optim.lr, got.data.seed) == (0.5, 7)


def test_another_seed_or_data_set_cannot_take_over_a_run() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    for flags in (["--seed", "1"], ["--size", "500"]):
        with pytest.raises(ValueError, match="the order of samples would change"):
            train(World(), "Tiny", ["--resume", "here", "--n_steps", "4", *flags])


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used() -> None:
    train(World(), "Tiny", ["--n_steps", "4", "--save_every", "2", "--out", "here"])
    file = Path("here/checkpoints/step-00000004/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    got = run_dir("--resume", "auto", "--out", "here")
    assert got.resume_from == Path("here/checkpoints/step-00000002")
    assert "step-00000004" in got.notes[0] and "model.safetensors" in got.notes[0]


def test_if_all_are_damaged_nothing_starts_from_scratch_silently() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    Path("here/checkpoints/step-00000002/state.json").unlink()
    with pytest.raises(ValueError, match="no good checkpoint"):
        run_dir("--resume", "auto", "--out", "here")


def resumed(*flags: str) -> TrainConfig:
    return parse(tiny.Tiny, ["--resume", "here", *flags], "test", find_config).train


def edit(*pairs: tuple[str, str]) -> None:
    file = Path("here/config.yaml")
    text = file.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def test_a_config_that_was_edited_is_noticed_when_its_run_is_resumed() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--lr", "0.5", "--ema_decay", "0.9", "0.99", "--out", "here"])
    assert resumed().optim.lr == 0.5
    edit(("lr: 0.5\n", "lr: 0.25\n"), ("seed: 0\n", ""), ("tensorboard: false", "tensorboard: true"))
    with pytest.raises(ValueError) as error:
        resumed()
    said = str(error.value)
    for change in ("here/config.yaml was edited", "seed is missing, was 0", "lr is 0.25, was 0.5", "true, was false"):
        assert change in said
    assert "add --lr 0.25 --tensorboard to use what is in the file, or" in said
    assert set(said.partition(", or ")[2].removesuffix(" to keep what the run had").split()) == {
        "--seed", "0", "--lr", "0.5", "--no_tensorboard",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"wrote it: seed is missing, was 0; tensorboard is true"):
        resumed("--lr", "0.25")
    assert resumed("--lr", "0.25", "--seed", "0", "--tensorboard").optim.lr == 0.25
    train(World(), "Tiny", ["--resume", "here", "--n_steps", "4", "--lr", "0.25", "--seed", "0", "--no_tensorboard"])
    assert resumed().optim.lr == 0.25 and resumed().data.n_steps == 4


def test_a_setting_that_was_added_to_a_config_is_noticed_and_decided_by_its_opposite() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    edit(("n_steps: 2\n", "epochs: 3\n"))
    with pytest.raises(ValueError, match=r"n_steps is missing, was 2; epochs is 3, was not set.*--epochs 3"):
        resumed()
    assert resumed("--n_steps", "4").data.n_steps == 4
    assert resumed("--epochs", "1").data.epochs == 1


def test_comments_and_order_in_a_config_may_change() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    lines = Path("here/config.yaml").read_text().splitlines()
    Path("here/config.yaml").write_text("\n".join(["# mine", *sorted(lines)]))
    assert resumed().data.n_steps == 2


def test_a_config_that_is_gone_is_not_taken_for_the_defaults() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--lr", "0.5", "--out", "here"])
    Path("here/config.yaml").unlink()
    with pytest.raises(ValueError, match=r"here has lost its config.yaml; `settings` in its receipt.json"):
        resumed()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"settings": 3}'])
def test_a_run_with_a_damaged_receipt_can_still_be_resumed(content: str) -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--lr", "0.5", "--out", "here"])
    Path("here/receipt.json").write_text(content)
    assert resumed().optim.lr == 0.5


def test_a_checkpoint_of_another_model_says_which_tensor_and_shape() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    with pytest.raises(ValueError, match=r"0\.weight.*16.*9") as error:
        train(World(), "Tiny", ["--resume", "here", "--width", "9"])
    assert "step-00000002" in str(error.value)


def test_a_finished_run_can_be_finished_again_and_made_longer() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    Path("here/model.pth").unlink()  # as if it had been killed before its end
    saved = Path("here/checkpoints/step-00000002/manifest.json").stat().st_mtime_ns
    train(World(), "Tiny", ["--resume", "here"])
    assert Path("here/model.pth").exists()
    assert Path("here/checkpoints/step-00000002/manifest.json").stat().st_mtime_ns == saved
    train(World(), "Tiny", ["--resume", "here", "--n_steps", "4"])
    assert Path("here/checkpoints/step-00000004").exists()


def test_the_receipt_tells_what_holds_and_what_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lr_scaling", "linear", "--base_batch_size", "4", "--momentum", "0.5", "--use_amp", "--distributed"]
    run = trainer(World(), "Tiny", [*flags, "--gradient_accumulation_steps", "2", "--out", "here"])
    run._open_trackers()
    shown = " ".join(capsys.readouterr().out.split())
    assert "8 micro-batch × 2 accumulation × 1 world = 16" in shown
    assert "0.04 = 0.01 scaled linear" in shown
    for remark in ("momentum has no effect", "use_amp has no effect", "there is one process"):
        assert remark in shown
    assert "base_batch_size" not in shown
    written = json.loads(Path("here/receipt.json").read_text())
    assert written["spec"].endswith("tiny.py:Tiny") and written["parameters"] == "452"


def test_smoke_is_on_the_receipt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(os.environ, "LOCKSTEP_SMOKE", "2")
    train(World(), "Tiny", ["--out", "here"])
    assert "LOCKSTEP_SMOKE=2" in capsys.readouterr().out


def test_a_damaged_receipt_of_another_run_stands_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "x")
    for content in ("", "{", "[]", "null"):
        Path("runs/tiny/old").mkdir(parents=True, exist_ok=True)
        Path("runs/tiny/old/receipt.json").write_text(content)
        assert run_dir().resume_from is None


def test_a_folder_named_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    train(World(), "Tiny", ["--n_steps", "1", "--out", "m[/b]x"])
    assert "m[/b]x" in capsys.readouterr().out and Path("m[/b]x/model.pth").exists()


def test_a_start_that_failed_leaves_nothing_in_the_way() -> None:
    run_dir("--out", "here")  # and then the data are not there, say
    assert run_dir("--out", "here").resume_from is None


def test_a_run_that_failed_before_its_first_checkpoint_logs_each_step_once() -> None:
    flags = ["--n_steps", "6", "--log_every", "2", "--out", "here", "--resume", "auto"]
    failing = trainer(World(), "Tiny", flags)
    step = failing.train_step

    def fails_at_5() -> None:
        if failing.progress.step == 4:
            raise KeyError("a failure")
        step()

    failing.train_step = fails_at_5  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        failing.fit()
    train(World(), "Tiny", flags)
    assert [line["step"] for line in lines(Path("here")) if "loss" in line] == [2, 4, 6]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_at_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.flags.write_text", full_disk)
    with pytest.raises(ValueError, match="cannot write to here: No space left on device"):
        train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])


def test_weights_that_could_not_be_written_are_written_when_the_run_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(NotSaved, match="training is complete, but the weights could"):
        patch.setattr("lockstep.state.export", full_disk)
        train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    assert not list(Path("here").glob("model*"))
    train(World(), "Tiny", ["--resume", "here"])
    assert Path("here/model.pth").exists() and Path("here/model.safetensors").exists()


def test_a_run_of_version_0_1_can_be_resumed() -> None:
    """Its checkpoint after 4 of 8 steps; version 0.1 itself went on to the one after 8, with other dropout masks."""
    old = Path(__file__).parent / "golden" / "run-0.1"
    shutil.copytree(old, "here", ignore=shutil.ignore_patterns("step-00000008"))
    run = trainer(World(), "WithDropout", ["--resume", "here"])
    tensors, _ = run.state.capture()
    before = load(old / "checkpoints" / "step-00000004").tensors
    for group in ("model", "optimizer", "ema-0.9"):
        assert tensors[group].keys() == before[group].keys()
        for name, tensor in before[group].items():
            assert torch.equal(tensors[group][name], tensor), f"{group} {name}"
    run.fit()
    ours, theirs = (load(folder / "checkpoints" / "step-00000008") for folder in (Path("here"), old))
    for name, tensor in theirs.tensors["model"].items():
        assert (ours.tensors["model"][name] - tensor).norm() < 0.3 * tensor.norm(), name
    assert ours.state["ledger"] == theirs.state["ledger"]
    assert ours.state["schedule"]["drops"] == theirs.state["drops"] == 3
    assert ours.state["progress"]["bad_evaluations"] == theirs.state["bad_evaluations"]


def test_a_run_of_another_recipe_is_named() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    for flags in (["--resume", "here"], ["--resume", "auto", "--out", "here"]):
        with pytest.raises(ValueError, match=r"here is a run of the recipe tiny, not of labelled; .* --resume here"):
            train(World(), "Labelled", flags)


def test_a_recipe_that_is_found_under_another_name_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])  # a script's recipe has the name of its folder
    monkeypatch.setattr(tiny.Tiny, "name", "script")
    train(World(), "Tiny", ["--n_steps", "3", "--resume", "here"])


def test_a_length_that_is_passed_already_is_said_and_changes_nothing() -> None:
    train(World(), "Tiny", ["--n_steps", "4", "--out", "here"])
    before = Path("here/config.yaml").read_text()
    with pytest.raises(ValueError, match="the run to resume is at step 4, and --n_steps or --epochs ask for 3"):
        train(World(), "Tiny", ["--resume", "here", "--n_steps", "3"])
    assert Path("here/config.yaml").read_text() == before


def test_a_complete_run_that_is_resumed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--n_steps", "4", "--out", "here"], ["--resume", "here"]):
        train(World(), "Tiny", flags)
    assert "nothing to train: the run is at its last step, 4; --n_steps N makes it longer" in capsys.readouterr().out


def test_the_receipt_of_a_resumed_run_names_what_has_changed() -> None:
    train(World(), "Tiny", ["--n_steps", "2", "--out", "here"])
    notes = json.loads(Path("here/receipt.json").read_text())["notes"]
    assert not any("changed" in note for note in notes)
    train(World(), "Tiny", ["--resume", "here", "--n_steps", "4", "--lr", "0.5"])
    notes = json.loads(Path("here/receipt.json").read_text())["notes"]
    assert "changed since the run was last started: n_steps is 4 (was 2), lr is 0.5 (was 0.01)" in notes
