"""Accelerate and Lightning scripts for GPUs, on a machine without one."""

from pathlib import Path

import pytest
import torch

from audit.zoo import ZOO, audited

TRAINER = ZOO / "07_randomness/ok_lightning.py"
CASES = {
    "a trainer that finds its GPUs": (TRAINER, {'accelerator="cpu",': "", "devices=2,": "", 'strategy="ddp",': ""}, []),
    "a trainer that asks for them": (
        TRAINER,
        {'accelerator="cpu",': 'accelerator="gpu", precision="16-mixed",', "devices=2,": "devices=-1,"},
        [],
    ),
    "a trainer on two machines": (
        TRAINER,
        {'accelerator="cpu",': 'accelerator="gpu",', "devices=2,": "devices=2, num_nodes=2,"},
        [],
    ),
    "fabric": (
        ZOO / "01_unsynchronised/ok_fabric.py",
        {'accelerator="auto", devices=2': 'accelerator="gpu", devices="auto", precision="16-mixed"'},
        [],
    ),
    "one GPU": (TRAINER, {'accelerator="cpu"': 'accelerator="gpu"', "devices=2": "devices=1"}, ["crashed"]),
    "accelerate": (
        ZOO / "01_unsynchronised/ok_accelerate.py",
        {"Accelerator(cpu=True)": 'Accelerator(mixed_precision="fp16")'},
        [],
    ),
    "accelerate with what was not prepared": (
        ZOO / "01_unsynchronised/bug_accelerate_unprepared.py",
        {"Accelerator(cpu=True)": "Accelerator()"},
        ["unsynchronised"],
    ),
}  # fmt: skip


def audit_of_case(case: str, folder: Path, device: str = "cpu") -> list[str]:
    """Return the findings in a modified script of the zoo."""
    script, changes, _ = CASES[case]
    text = script.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    return audited(["train.py"], str(folder), device)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ranks_of_a_framework_train_together_without_a_gpu(tmp_path: Path, case: str) -> None:
    assert audit_of_case(case, tmp_path) == CASES[case][2]
