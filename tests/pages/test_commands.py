"""Every command in docs/ is understood by the program that it starts, and says what it needs."""

import shlex
from pathlib import Path

import pytest
from processes import ROOT

from lockstep import flags, registry
from lockstep.batching import Batching
from lockstep.optim import scaled_lr
from pages.commands import PAGES, Command, check, commands, prepare


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_every_command_of_the_page_is_understood(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, monkeypatch)
    wrong = {}
    for command in commands(page.read_text(encoding="utf-8")):
        try:
            check(command)
        except (AssertionError, ValueError, SystemExit) as error:
            wrong[shlex.join(command.words)] = f"{error} {capsys.readouterr().err}"
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "lockstep tran dit",
        "lockstep train dit --bach_size 4",
        "lockstep train dit --preset lapto",
        "lockstep train nothing",
        "lockstep predict RUN",
        "lockstep sample RUN --m 4",
        "lockstep plan dit --gpu h1000",
        "lockstep audit --stepz 3 train.py",
        "torchrun --nproc_per_node=2 -m lockstep train dit --lrr 1",
        "torchrun --nnodes=2 -m lockstep train dit",
        "sbatch deploy/slurm/train.sbatch dit",
        "python benchmarks/nothing.py",
        "make nothing",
        "pip install -e '.[nothing]'",
        "frobnicate",
    ],
)
def test_a_wrong_command_is_noticed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    with pytest.raises((AssertionError, ValueError, SystemExit)):
        check(Command(tuple(shlex.split(line)), needs=False))


def test_pages_have_commands() -> None:
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 80


def rows_of_guides(page: Path) -> list[list[str]]:
    """Return the cells of the table of the guides' batch sizes."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.read_text("utf-8").splitlines()]
    return [row for row in rows if len(row) == 5 and row[1].isdigit()]


@pytest.mark.parametrize("name", ["batch-size.md", "zh/batch-size.md"])
def test_batch_sizes_and_learning_rates_are_those_that_a_run_would_have(name: str) -> None:
    rows = rows_of_guides(ROOT / "docs" / name)
    assert len(rows) == 14
    for _, gpus, words, global_batch, lr in rows:
        given = shlex.split(words.strip("`"))
        train = flags.parse(registry.find("dit"), [*given, "--n_steps", "1"], "test").train
        batching = Batching.plan(train.data, 100_000, int(gpus))
        assert batching.global_batch == int(global_batch), words
        assert scaled_lr(train.optim, batching.global_batch) == pytest.approx(float(lr), rel=2e-3), words
