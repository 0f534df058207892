"""Every training command of the guides, as printed, from its example folder; GPUs become CPU processes."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from multi.ranks import free_port
from multi.test_launch import ROOT, environment

DIT = {
    "bash run_ddp.sh": (2, 0),
    "bash run_ddp.sh --num_register_tokens 4": (2, 4),
    "bash run_ddp.sh --num_register_tokens 8 --batch_size 64 --lr 2e-4": (2, 8),
    "CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --nproc_per_node=4 --master_port=29500 train.py": (4, 0),
    "CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --nproc_per_node=4 --master_port=29500 train.py"
    " --num_register_tokens 4 --batch_size 64": (4, 4),
    "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 torchrun --nproc_per_node=8 --master_port=29500 train.py"
    " --num_register_tokens 8": (8, 8),
    "bash run_single_gpu.sh": (1, 0),
    "bash run_single_gpu.sh --num_register_tokens 4": (1, 4),
    "bash run_single_gpu.sh --num_register_tokens 8 --batch_size 256 --lr 2e-4": (1, 8),
    "CUDA_VISIBLE_DEVICES=6 torchrun --nproc_per_node=1 --master_port=29500 train.py --num_register_tokens 4": (1, 4),
    "torchrun --nproc_per_node=4 --master_port=29501 train.py": (4, 0),
}


def run(command: str, folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """As printed, but on a port that is free here."""
    command = re.sub(r"--master_port=\d+", f"--master_port={free_port()}", command)
    variables = environment(LOCKSTEP_SMOKE="2", **extra)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", DIT)
def test_dit(command: str, tmp_path: Path) -> None:
    world, registers = DIT[command]
    done = run(f"{command} --out {tmp_path}/run", ROOT / "examples/dit")
    assert done.returncode == 0, done.stderr[-3000:]
    receipt = json.loads((tmp_path / "run/receipt.json").read_text())
    assert receipt["global batch"] == f"2 micro-batch × 1 accumulation × {world} world = {2 * world}"
    assert receipt["learning rate"].startswith("0.0002," if "--lr 2e-4" in command else "0.0001,")
    assert receipt["parameters"] == f"{32_475_660 + registers * 384:,}"
    assert done.stdout.count("global batch") == 1
    checkpoints = [p.name for p in (tmp_path / "run/checkpoints").iterdir() if p.name.startswith("step-")]
    assert checkpoints == ["step-00000002"] and (tmp_path / "run/model.pth").exists()


def test_the_scripts_take_ports_and_process_counts_from_the_environment(tmp_path: Path) -> None:
    flags = f"--model DiT-Nano/8 --out {tmp_path}/run"
    done = run(f"bash run_ddp.sh {flags}", ROOT / "examples/dit", NUM_GPUS="3", MASTER_PORT=str(free_port()))
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run/receipt.json").read_text())["world"].startswith("3,")


@pytest.mark.slow
def test_help_of_the_example_lists_its_flags_with_the_guides_defaults() -> None:
    done = run("torchrun --nproc_per_node=1 train.py --help", ROOT / "examples/dit")
    text = " ".join(done.stdout.replace("│", " ").split())
    for flag, default in [("num_register_tokens INT", "0"), ("batch_size INT", "128"), ("lr FLOAT", "0.0001")]:
        assert re.search(rf"--{flag} [^(]*(\([^d][^)]*\)[^(]*)?\(default: {re.escape(default)}\)", text), flag
    assert "(default: 200000)" in text


def test_the_guide_is_covered() -> None:
    """The guide lies beside the repository in our workshop; where it does not, there is nothing to compare."""
    guide = ROOT.parent / "shared/seeds/000_e1f57c81ee270f98.txt"
    if not guide.exists():
        pytest.skip("the guide is not here")
    text = guide.read_text().replace("\\\n    ", "")
    printed = re.findall(r"^(?:CUDA_VISIBLE_DEVICES=\S+ )?(?:bash run_|torchrun ).*$", text, re.M)
    missing = [line for line in printed if line.strip() not in DIT and "--help" not in line]
    assert not missing and len(printed) >= 11, missing
    assert os.access(ROOT / "examples/dit/run_ddp.sh", os.X_OK)
