"""What only a GPU can show: the same draws as on a CPU, fast habits in force, NCCL ranks of one mind."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from engine import lines, trainer
from multi.ranks import free_port

from lockstep import checkpoint
from lockstep.config import Hardware
from lockstep.distributed import World
from lockstep.precision import choose
from lockstep.rng import Rng
from lockstep.watch.drift import checksums

CUDA = torch.device("cuda", 0)


def draws(epoch: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
    rng = Rng.of(11, epoch, index)
    return {
        "uniform": rng.uniform("u", 3, 32, 32),
        "integers": rng.integers("i", 1_000_003, 999),
        "bernoulli": rng.bernoulli("b", 0.1, 1001),
        "normal": rng.normal("n", 3, 32, 32),
    }


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance in units in the last place."""
    return int((a.view(torch.int32).long() - b.view(torch.int32).long()).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128])
def test_signs_that_change_together_are_noticed(dtype: torch.dtype) -> None:
    tensor, other = torch.ones(4, device=CUDA, dtype=dtype), torch.ones(4, device=CUDA, dtype=dtype)
    other[[1, 3]] *= -1
    assert checksums({"t": tensor}) == checksums({"t": tensor.clone()}) != checksums({"t": other})


@pytest.mark.parametrize("compiled", [False, True])
def test_draws_have_the_bits_of_the_cpu(compiled: bool) -> None:
    index = torch.arange(500)
    on_cpu = draws(index % 3, index)
    act = torch.compile(draws, fullgraph=True) if compiled else draws
    on_gpu = act((index % 3).to(CUDA), index.to(CUDA))
    for name in ("uniform", "integers", "bernoulli"):
        assert torch.equal(on_gpu[name].cpu(), on_cpu[name]), name
    assert ulps(on_gpu["normal"].cpu(), on_cpu["normal"]) <= 4


def test_generators_are_seeded_as_torch_seeds_them() -> None:
    for seed in (3, 2**64 - 5):
        torch.manual_seed(seed)
        expected = torch.rand(5, device=CUDA), torch.rand(5)
        World(device=CUDA).seed_generators(seed)
        assert torch.rand(5, device=CUDA).equal(expected[0]) and torch.rand(5).equal(expected[1])


def test_auto_precision_is_bf16_on_this_gpu() -> None:
    assert choose(Hardware(), CUDA).name == ("bf16" if torch.cuda.is_bf16_supported() else "fp16")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_step_does_not_wait_for_the_device(tmp_path: Path, precision: str) -> None:
    flags = ["--device", "cuda", "--precision", precision, "--num_workers", "0", "--ema_decay", "0.99"]
    run = trainer(World(device=CUDA), "Labelled", [*flags, "--clip_grad", "1", "--out", str(tmp_path / "run")])
    run.model.train()
    for _ in range(3):
        run.train_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # any wait raises
    try:
        run.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_workers_pinned_memory_and_the_side_stream_give_the_same_run(tmp_path: Path) -> None:
    weights = []
    for workers in ("0", "2"):
        flags = ["--device", "cuda", "--precision", "fp32", "--num_workers", workers, "--compile", "off"]
        run = trainer(World(device=CUDA), "Tiny", [*flags, "--out", str(tmp_path / workers)])
        run.fit()
        weights.append(run.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("compile", ["off", "on"])
def test_two_nccl_ranks_train_like_one(tmp_path: Path, compile: str) -> None:
    """Two ranks share the GPU, each with a host id of its own."""
    out = {world: tmp_path / f"{world}" for world in (1, 2)}
    flags = [
        "--model",
        "DiT-Nano/4",
        "--global_batch_size",
        "16",
        "--batch_size",
        "16",
        "--n_steps",
        "6",
        "--seed",
        "3",
    ]
    flags += ["--precision", "fp32", "--compile", compile, "--log_every", "1", "--sample_per_class", "1"]
    flags += ["--sample_steps", "2", "--no_tensorboard", "--num_workers", "1"]
    for world in (1, 2):
        start(world, ["dit", *flags, "--out", str(out[world])])
    curves = [[line["loss"] for line in lines(out[world]) if "loss" in line] for world in (1, 2)]
    assert len(curves[0]) == 6 and curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_batch_norm_over_nccl_ranks_has_the_statistics_of_one_process(tmp_path: Path) -> None:
    flags = [f"{tiny.__file__}:WithBatchNorm", "--precision", "fp64", "--global_batch_size", "32", "--batch_size", "32"]
    flags += ["--n_steps", "20", "--log_every", "1", "--compile", "off", "--num_workers", "1"]
    for world in (1, 2):
        start(world, [*flags, "--out", str(tmp_path / str(world))])
    ends = [checkpoint.load(tmp_path / str(world) / "checkpoints/step-00000020").tensors["model"] for world in (1, 2)]
    assert "1.running_var" in ends[0]
    for name, tensor in ends[0].items():
        assert (ends[1][name].double() - tensor.double()).norm() <= 1e-9 * tensor.double().norm(), name


def test_a_real_lack_of_memory_is_met_by_smaller_pieces(tmp_path: Path) -> None:
    flags = ["--device", "cuda", "--precision", "fp32", "--compile", "off", "--width", "4096", "--size", "4096"]
    flags += ["--batch_size", "4096", "--n_steps", "2", "--num_workers", "8", "--lr", "1e-4"]
    weights = []
    for name, room in (("plenty", 1.0), ("little", 0.6 / (torch.cuda.mem_get_info()[1] / 2**30))):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(room)
        try:
            run = trainer(World(device=CUDA), "Plain", [*flags, "--out", str(tmp_path / name)])
            run.fit()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        weights.append({name: tensor.cpu() for name, tensor in run.model.state_dict().items()})
        pieces = run.setup.batching.accumulation
        del run
        gc.collect()
    assert pieces > 1 and "out of memory at step" in (tmp_path / "little/log.txt").read_text()
    for name, tensor in weights[0].items():
        assert (weights[1][name] - tensor).norm() <= 1e-4 * tensor.norm(), name


def start(world: int, flags: list[str]) -> None:
    ranks, port = [], str(free_port())
    for rank in range(world):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host{rank}"}
        ranks.append(subprocess.Popen([sys.executable, "-m", "lockstep", "train", *flags], env=environment))
    assert [rank.wait(timeout=400) for rank in ranks] == [0] * world
