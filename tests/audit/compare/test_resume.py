"""lockstep audit --resume: a script that resumes as it should has no finding, and each thing it loses is named."""

import json
import subprocess
from pathlib import Path

import pytest
from processes import environment

from lockstep.audit.compare.flags import resume_words
from lockstep.audit.compare.mirror import Mirror
from lockstep.audit.compare.resume import compare
from lockstep.audit.events import Backward, Batch, CheckpointSaved, Event, Step, StepStart
from lockstep.audit.model import Rank, Trace

SCRIPT = Path(__file__).with_name("resumable.py")


def audited(folder: Path, *flags: str, own: tuple[str, ...] = ()) -> tuple[dict[str, str], str]:
    """Names and severities of what is found, and what was printed."""
    (folder / "train.py").write_text(SCRIPT.read_text())
    words = ["lockstep", "audit", "--resume", "--json", "audit.json", *own, "--", "train.py", *flags]
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert (folder / "audit.json").exists(), done.stdout + done.stderr
    assert not (folder / "last.pt").exists()  # it runs in a copy of the folder
    findings = json.loads((folder / "audit.json").read_text())["findings"]
    return {f["name"]: f["severity"] for f in findings}, done.stdout


@pytest.mark.slow
def test_a_script_that_restores_everything_goes_on_to_the_bit(tmp_path: Path) -> None:
    found, printed = audited(tmp_path)
    assert found == {}
    assert "--resume is in its parser" in printed and "steps 14 to 20 were compared" in printed
    assert "the same to the bit" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--lose", "model"), {"resume-weights": "error"}),
        (("--lose", "optimizer"), {"resume-optimizer": "error", "resume-schedule": "error"}),
        (("--lose", "optimizer", "--optimizer", "sgd"), {"resume-schedule": "error"}),  # it has no state to lose
        (("--lose", "scheduler"), {"resume-schedule": "error"}),
        (("--lose", "position"), {"resume-samples": "warning"}),
        (("--lose", "rng"), {"resume-randomness": "warning"}),
        (("--lose", "nothing-left"), {"not-resumed": "error"}),
    ],
)
def test_what_is_lost_is_named(tmp_path: Path, flags: tuple[str, ...], expected: dict[str, str]) -> None:
    assert audited(tmp_path, *flags, own=("--nproc", "1"))[0] == expected


@pytest.mark.slow
def test_a_script_that_begins_anew_is_told_so(tmp_path: Path) -> None:
    found, printed = audited(tmp_path, own=("--nproc", "1", "--resume-args", "--lose rng"))
    assert found["resume-weights"] == "error" and "train.py --lose rng" in printed


@pytest.mark.slow
def test_a_script_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    words = ["lockstep", "audit", "--resume", "--nproc", "1", "--steps", "4", "train.py"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 2 and "saved no checkpoint with a step after it in its first 4 steps" in done.stderr


# -- the comparison, without processes --------------------------------------------------------------------------------
def steps(first: int, last: int, save: int | None = None, **lost: int) -> Rank:
    """A rank that takes steps, whose state follows from the number of the step, plus `lost` of weights, moments, lr."""
    recorded: list[Event] = []
    for n in range(first, last + 1):
        state = {key: {"w": n + lost.get(key, 0)} for key in ("weights", "moments")}
        recorded.append(Batch(0, 1, 1, True, [n + lost.get("samples", 0)]))
        recorded.append(Backward())
        recorded.append(StepStart(0, n - first + 1, state["weights"], state["moments"], {"torch": n}))
        recorded.append(Step(0, n - first + 1, [0.1 * n + lost.get("lr", 0)]))
        recorded += [CheckpointSaved(n)] if n == save else []
    return Rank(0, recorded, [], 0)


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ({}, set()), ({"moments": 5}, {"resume-optimizer"}), ({"lr": 1}, {"resume-schedule"}),
        ({"samples": 7}, {"resume-samples"}), ({"weights": 50}, {"resume-weights"}),
    ],
)  # fmt: skip
def test_the_comparison_names_what_differs(lost: dict[str, int], expected: set[str]) -> None:
    found, _ = compare(Trace([steps(1, 9, save=4)]), Trace([steps(5, 9, **lost)]))
    assert {one.kind.name for one in found} == expected


def test_an_earlier_checkpoint_than_the_last_may_be_resumed() -> None:
    first = steps(1, 9, save=4)
    first.events.insert(8, CheckpointSaved(2))
    found, notes = compare(Trace([first]), Trace([steps(3, 7)]))
    assert found == [] and "after step 2; steps 3 to 7" in notes[0]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("'--resume', action='store_true'", ["--resume"]),
        ("'-r', '--resume_from', default=None", ["--resume_from", "out/last.pt"]),
        ("'--load-checkpoint', type=str", ["--load-checkpoint", "out/last.pt"]),
        ("'--checkpoint_dir'", []),
    ],
)
def test_the_flag_that_resumes_is_read_from_the_parser(tmp_path: Path, declared: str, expected: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"parser.add_argument({declared})\n")
    words, _ = resume_words([str(script), "--lr", "1"], None, tmp_path / "out" / "last.pt", tmp_path)
    assert words == [str(script), "--lr", "1", *expected]
    given, _ = resume_words([str(script)], "--from '{checkpoint}'", tmp_path / "out" / "last.pt", tmp_path)
    assert given == [str(script), "--from", "out/last.pt"]


def test_the_copy_of_a_folder_can_be_written_to(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "out").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "out" / "last.pt").write_text("old")
    mirror = Mirror(source, tmp_path / "copy")
    (mirror.target / "out" / "last.pt").write_text("new")
    assert (source / "out" / "last.pt").read_text() == "old" and not (mirror.target / ".git").exists()
