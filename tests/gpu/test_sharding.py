"""Sharded runs on NCCL ranks that share the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.audit.launcher import free_port

FLAGS = ["--n_steps", "6", "--log_every", "2", "--batch_size", "8", "--global_batch_size", "32", "--ema_decay", "0.9"]
FLAGS += ["--clip_grad", "1", "--eval_every", "3", "--sample_every", "0", "--num_workers", "0", "--hang_timeout", "0"]


def train(folder: Path, world: int, flags: list[str]) -> dict[str, Tensor]:
    """Return the weights and the averages after a run of `dit`."""
    started, port = [], str(free_port())
    command = [sys.executable, "-m", "lockstep", "train", "dit", "--preset", "laptop", *FLAGS, *flags]
    for rank in map(str, range(world)):
        group = {"RANK": rank, "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
        group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if world > 1 else {}
        variables = os.environ | (group if world > 1 else {})
        started.append(subprocess.Popen([*command, "--device", "cuda", "--out", str(folder)], env=variables))
    assert [process.wait(500) for process in started] == [0] * world
    return load_file(folder / "model.safetensors") | {
        f"ema/{name}": tensor for name, tensor in load_file(folder / "model_ema.safetensors").items()
    }


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in sorted(tensors.items())}


def test_sharded_optimizer_state_gives_the_bits_of_ddp(tmp_path: Path) -> None:
    flags = ["--precision", "fp32", "--exact", "--compile", "off"]
    plain = train(tmp_path / "none", 2, flags)
    assert bits(plain) == bits(train(tmp_path / "optimizer", 2, [*flags, "--shard", "optimizer"]))


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_fully_sharded_ranks_give_what_ddp_gives(tmp_path: Path, compiled: str) -> None:
    flags = ["--precision", "fp32", "--optimizer", "sgd", "--compile", compiled]
    plain = train(tmp_path / "none", 2, flags)
    sharded = train(tmp_path / "full", 2, [*flags, "--shard", "full", "--activation_checkpointing", "selective"])
    assert plain.keys() == sharded.keys()
    for name, tensor in plain.items():
        assert torch.linalg.vector_norm(sharded[name] - tensor) <= 1e-3 * torch.linalg.vector_norm(tensor) + 1e-5, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exact_fully_sharded_ranks_have_the_bits_of_one(tmp_path: Path, precision: str) -> None:
    flags = ["--precision", precision, "--exact", "--compile", "off"]
    alone = train(tmp_path / "1", 1, flags)
    assert bits(alone) == bits(train(tmp_path / "2", 2, [*flags, "--shard", "full"]))
