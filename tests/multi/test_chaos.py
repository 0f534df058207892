"""A few of the faults of benchmarks/chaos.py: the run ends with the bits of the undisturbed one, and leaves nothing."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from faults.inject import BIT_FLIP, DAMAGED, FULL_DISK, IMMUTABLE, NAN, Fault
from faults.runs import CURVE, disturbed, undisturbed

pytestmark = pytest.mark.slow

FAULTS = [
    Fault("SIGKILL", "rank 1", "step", 1, 13, 0.0, 0.0, 0),
    Fault(NAN, "batch", "step", 1, 3, 0.0, 0.0, 0),
    Fault(BIT_FLIP, "rank 0", "step", 0, 7, 0.0, 0.0, 5),
    Fault("SIGSTOP", "rank 0", "evaluation", 0, 1, 0.0, 0.3, 0),
    Fault("SIGTERM", "launcher", "checkpoint", 0, 3, 0.0, 0.0, 0),
    Fault(DAMAGED, "rank 0", "checkpoint", 0, 9, 0.0, 0.0, 11),
    Fault("SIGHUP", "rank 1", "sampling", 1, 1, 0.01, 0.0, 0),
    Fault("SIGKILL", "launcher", "export", 0, 2, 0.0, 0.0, 0),
]
DISK_FAULTS = [
    Fault(FULL_DISK, "disk", "checkpoint", 0, 4, 0.0, 0.0, 0),
    Fault(IMMUTABLE, "run folder", "checkpoint", 0, 8, 0.0, 0.5, 0),
    Fault(FULL_DISK, "disk", "export", 0, 1, 0.0, 0.0, 0),
]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder near the root: loader processes listen on sockets below it, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as folder:
        yield Path(folder)


def test_a_run_under_faults_ends_with_the_bits_of_the_undisturbed_one(short_path: Path) -> None:
    reference = undisturbed(short_path / "undisturbed", CURVE)
    result = disturbed(short_path / "faults", CURVE, ["--num_workers", "1"], FAULTS, reference, False)
    assert not result.failure
    assert len(result.faults) >= 6 and {NAN, BIT_FLIP} <= result.found.keys()
    if os.geteuid() == 0:  # only root has a small disk to fill, and can make a folder immutable
        result = disturbed(short_path / "disk", CURVE, [], DISK_FAULTS, reference, False)
        assert not result.failure and len(result.faults) == 3
