"""The table of commands: complete, and what `lockstep --help` prints."""

import importlib
from pathlib import Path

import pytest

from lockstep import cli, commands


def test_every_file_of_commands_is_in_the_table_and_can_be_run() -> None:
    files = {path.stem for path in Path(commands.__path__[0]).glob("*.py")} - {"__init__", "trained"}
    assert files == set(cli.COMMANDS)
    for name in cli.COMMANDS:
        assert callable(importlib.import_module(f"lockstep.commands.{name}").run)


def test_help_names_every_command_and_readme_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for name, command in cli.COMMANDS.items():
        assert f"lockstep {name}" in shown and command.summary in shown
        assert f"lockstep {name}" in readme or name == "recipes"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["tran"])
    assert end.value.code == 2 and "did you mean 'train'?" in capsys.readouterr().err
