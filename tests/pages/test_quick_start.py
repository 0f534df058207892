"""The commands of docs/quick-start.md, from training to results, one after the other as a newcomer would."""

import re
from pathlib import Path

import pytest
from multi.test_launch import run
from processes import ROOT

from pages.commands import commands

PAGE = (ROOT / "docs/quick-start.md").read_text(encoding="utf-8")
TRIED = ("## Train", "## Look at the result")

FURTHER = {
    "train": ("--device", "cpu", "--log_every", "1"),
    "sample": ("--device", "cpu", "--steps", "2"),
    "test": ("--device", "cpu"),
}
"""Flags that make a command quick, and a curve of two points."""


def section(title: str) -> str:
    return PAGE.partition(f"{title}\n")[2].partition("\n## ")[0]


@pytest.mark.slow
def test_the_commands_up_to_the_results_succeed_and_the_folder_is_as_described(tmp_path: Path) -> None:
    for title in TRIED:
        for command in commands(section(title)):
            done = run([*command.words, *FURTHER.get(command.words[1], ())], tmp_path, LOCKSTEP_SMOKE="2")
            expected = 1 if command.words[1] == "top" else 0  # 1: the run is over
            assert done.returncode == expected, f"{command.words}: {done.stderr}"
    folder = tmp_path / "runs/first"
    table = re.findall(r"^\| ([^|]*) \|", section("## Look at the result"), re.M)
    names = [name for row in table for name in re.findall(r"`([\w./]+)`", row)]
    assert len(names) >= 8 and [name for name in names if name != "runs/first" and not (folder / name).exists()] == []
