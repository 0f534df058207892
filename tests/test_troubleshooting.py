"""docs/troubleshooting.md: it has the engine's messages, the doctor's checks, and what the guides list."""

import ast
import re
from pathlib import Path

import pytest

import lockstep

ROOT = Path(lockstep.__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TEXT = " ".join(PAGE.split())
FILES = (
    "bad_steps", "batching", "checkpoint", "cores", "distributed", "evaluate", "exact", "launch", "parallel",
    "registry", "rendezvous", "rundir", "runlock", "setup", "step", "trainer",
)  # fmt: skip
"""Of the engine: where a run that was started right may fail all the same."""
INTERNAL = {"a stop was requested"}
"""Raised and caught inside the package."""
GUIDES = (
    "Address already in use", "hangs", "CUDA out of memory", "NCCL error: unhandled system error", "NCCL time-out",
    "More GPUs are not faster", "CUDA driver version", "firewall", "Data are not found", "communication error",
    "nvidia-smi", "NCCL_DEBUG=INFO", "--num_workers", "--gradient_accumulation_steps", "--no_use_amp", "--master_port",
)  # fmt: skip
"""What the guides' chapters on troubleshooting name."""


def pieces(node: ast.expr) -> list[str]:
    """The literal parts of a message."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.Constant)]
    if isinstance(node, ast.BinOp):
        return pieces(node.left) + pieces(node.right)
    return []


def messages(name: str) -> list[str]:
    """The longest literal part of each message that a file raises."""
    found = []
    for node in ast.walk(ast.parse((ROOT / "lockstep" / f"{name}.py").read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            parts = [" ".join(part.split()).strip(" ;:") for part in pieces(node.exc.args[0])]
            longest = max(parts, key=len, default="")
            if len(longest) >= 8 and longest not in INTERNAL:
                found.append(longest)
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_page_has_every_message_that_a_run_may_end_with(name: str) -> None:
    missing = [message for message in messages(name) if message not in TEXT]
    assert not missing, f"docs/troubleshooting.md lacks a line for: {missing}"


def test_messages_are_found_in_the_sources() -> None:
    assert sum(len(messages(name)) for name in FILES) > 40


@pytest.mark.parametrize("symptom", GUIDES)
def test_the_page_has_the_symptoms_and_remedies_of_the_guides(symptom: str) -> None:
    assert symptom in TEXT


def test_checks_and_flags_that_the_page_names_exist() -> None:
    doctor = "".join(path.read_text() for path in (ROOT / "lockstep" / "doctor").glob("*.py"))
    for group in re.findall(r"\(lines? ([^)]*?)[):]", PAGE):
        for name in re.findall(r"`([^`]+)`", group):
            assert name in doctor or name.startswith("GPU "), f"the page names the check {name}"
    config = (ROOT / "lockstep" / "config.py").read_text()
    options = (ROOT / "lockstep" / "options.py").read_text()
    foreign = {"master_port", "master_addr", "shm", "ipc"}
    for flag in set(re.findall(r"--([a-z_]+)", PAGE)) - foreign:
        name = flag.removeprefix("no_")
        assert f"    {name}: " in config + options or name in ("data_path", "help"), f"the page names --{flag}"
