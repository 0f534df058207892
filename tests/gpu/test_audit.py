"""The audit on a real GPU, which all ranks share if there is only one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from audit.emulate.test_frameworks import CASES, audit_of_case
from audit.test_examples import EXAMPLES, audit_of_example


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert audit_of_example(name, tmp_path, monkeypatch, device="cuda") == []


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("one GPU", "a trainer on two machines")])
def test_ranks_of_a_framework_train_together(case: str, tmp_path: Path) -> None:
    assert audit_of_case(case, tmp_path, device="cuda") == CASES[case][2]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs one GPU only")
def test_a_second_gpu_that_cannot_be_redirected_is_reported(tmp_path: Path) -> None:
    script = "import os, torch\ntorch._C._cuda_setDevice(int(os.environ['RANK']))\n"
    (tmp_path / "train.py").write_text(script)
    words = [sys.executable, "-m", "lockstep", "audit", "--device", "cuda", "--", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "try --device cpu" in done.stdout, done.stdout + done.stderr
