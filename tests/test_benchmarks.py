"""Every benchmark runs, at a tiny size."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def printed(name: str, *flags: str) -> str:
    """Return the output of a benchmark of micro-batches of 2. Its exit status is no matter: times mean nothing here."""
    command = [sys.executable, str(BENCHMARKS / name), "--preset", "laptop", "--device", "cpu", *flags]
    environment = {**os.environ, "LOCKSTEP_SMOKE": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_watching_prints_the_cost_of_probes_and_checks() -> None:
    step, audit, check = printed("watching.py", "--rounds", "1", "--steps", "2").splitlines()
    assert re.fullmatch(r"a step of dit: \d+\.\d ms", step)
    assert re.fullmatch(r"the audit's probes: -?\d+\.\d\d % of a step \(claimed: below 5 %\)", audit)
    assert re.fullmatch(r"the checks of every run: \d+\.\d{3} % \(claimed: below 0.5 %\)", check)
