"""The table of commands: complete, and what `lockstep --help` prints."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import environment

import lockstep
from lockstep import cli, commands


def test_every_file_of_commands_is_in_the_table_and_can_be_run() -> None:
    files = {path.stem for path in Path(commands.__path__[0]).glob("*.py")} - {"__init__", "trained"}
    assert files == set(cli.COMMANDS)
    for name in cli.COMMANDS:
        assert callable(importlib.import_module(f"lockstep.commands.{name}").run)


def test_help_names_every_command_and_a_page_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    root = Path(__file__).parents[1]
    pages = "".join(page.read_text() for page in (root / "README.md", *(root / "docs").glob("*.md")))
    for name, command in cli.COMMANDS.items():
        assert f"lockstep {name}" in shown and command.summary in shown
        assert f"lockstep {name}" in pages or name == "recipes"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["tran"])
    assert end.value.code == 2 and "did you mean 'train'?" in capsys.readouterr().err


HELP = """
import sys
from lockstep.cli import main
try:
    main()
except SystemExit as end:
    sys.exit("torch was imported" if "torch" in sys.modules else end.code)
"""


def shown(*words: str) -> str:
    """What a command prints; it must not import torch, which takes longer than all the rest."""
    done = subprocess.run(
        [sys.executable, "-c", HELP, *words], env=environment(real=True), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_needs_neither_its_argument_nor_torch(name: str) -> None:
    text = shown(name, "--help")
    assert f"usage: lockstep {name}" in text
    known = {"train": "--global_batch_size", "verify": "--worlds", "audit": "--patience", "test": "--weights"}
    assert known.get(name, "") in text


def test_help_of_lockstep_needs_no_torch() -> None:
    assert shown("--help") == shown() == f"{cli.help_text()}\n"
    assert shown("help", "train") == shown("--help", "train") == shown("train", "--help")
    assert shown("predict", "RUN", "--help") == shown("predict", "--help", "RUN", "PATH")


@pytest.mark.parametrize("words", [["train", "vision", "--help"], ["train", "--help", "vision"]])
def test_help_before_and_after_a_recipe_lists_its_flags(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    assert "usage: lockstep train vision" in (text := capsys.readouterr().out) and "vision options" in text


def test_help_after_the_recipe_of_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["data", "protein", "-h"])
    assert end.value.code == 0 and "usage: lockstep data protein FOLDER" in capsys.readouterr().out


def test_the_version_names_torch_cuda_and_nccl(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert end.value.code == 0 and lines["torch"] == torch.__version__ and lines["lockstep"] == lockstep.__version__
    assert {"CUDA", "NCCL", "Python"} <= lines.keys()


COMPLETE = """
source lockstep.bash
COMP_WORDS=(lockstep "$@")
COMP_CWORD=$#
_tyro_lockstep
echo "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_recipes_flags_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--completion", "bash"])
    (tmp_path / "lockstep.bash").write_text(capsys.readouterr().out)

    def completed(*words: str) -> str:
        command = ["bash", "-c", COMPLETE, "bash", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout.strip()

    assert completed("t") == "test top train"
    assert completed("train", "d") == "dit"
    assert completed("train", "dit", "--sched") == "--schedule"
    assert completed("train", "dit", "--schedule", "c") == "constant cosine"
    assert completed("predict", "ru") == "", "bash completes files"


def test_completion_of_another_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--completion", "fish"])
    assert end.value.code == 2 and "one of bash, zsh, not 'fish'" in capsys.readouterr().err


def test_the_public_names_are_there_though_they_are_imported_late() -> None:
    assert set(lockstep.__all__) <= set(dir(lockstep))
    assert all(getattr(lockstep, name) is not None for name in lockstep.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = lockstep.fitt  # type: ignore[attr-defined]


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    script = "from lockstep.cli import exit_with\nexit_with(lambda: [print('x' * 80) for _ in range(10_000)] and 0)"
    command = f'{sys.executable} -c "{script}" | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command.replace("\\n", "\n")],
        env=environment(real=True),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 141 and not done.stderr, done.stderr
