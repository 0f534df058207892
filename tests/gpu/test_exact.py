"""Exact sums on a GPU: the kernels against plain torch, and real recipes on NCCL ranks that share the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine import lines

from lockstep import exact
from lockstep.audit.launcher import free_port
from lockstep.watch.fingerprints import add_checksums

CUDA = torch.device("cuda", 0)


def test_the_kernels_have_the_bits_of_plain_torch() -> None:
    from lockstep import exact_cuda

    torch.manual_seed(3)
    shapes = [(1,), (5,), (4096,), (4097,), (33, 129), (0,), (3, 64, 64), (257, 1023)]
    scales = exact._power_of_two(torch.tensor([20, 18, 25, 3, 22, 0, 19, 24]))
    tiles = [[torch.randn(shape) * 2.0 ** (k - i) for i, shape in enumerate(shapes)] for k in range(3)]
    results = []
    for device, add, floats in (
        (torch.device("cpu"), exact._add_tile, exact._to_floats),
        (CUDA, exact_cuda.add_tile, exact_cuda.to_floats),
    ):
        largest = torch.zeros(len(shapes), dtype=torch.int32, device=device)
        totals = None
        for number, tile in enumerate(tiles):
            gradients = [(i, t.to(device).clone()) for i, t in enumerate(tile)]
            before = totals or [None] * len(shapes)
            last = number == len(tiles) - 1
            totals = (
                [g.view(torch.int32) for _, g in gradients]
                if last
                else totals or [torch.empty_like(g, dtype=torch.int32) for _, g in gradients]
            )
            add(gradients, before, totals, scales.to(device), largest)
        integers = [t.cpu().clone() for t in totals]
        floats(gradients, (1 / scales).to(device))
        results.append((largest.cpu(), integers, [g.cpu() for _, g in gradients]))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1] + results[0][2], results[1][1] + results[1][2], strict=True):
        assert torch.equal(a, b)


def test_a_gradient_that_is_not_a_number_is_seen() -> None:
    from lockstep import exact_cuda

    for value in (float("nan"), float("inf"), -float("inf")):
        gradient = torch.ones(5000, device=CUDA)
        gradient[4321] = value
        largest = torch.zeros(1, dtype=torch.int32, device=CUDA)
        exact_cuda.add_tile([(0, gradient)], [None], [gradient.view(torch.int32)], torch.ones(1, device=CUDA), largest)
        assert int(largest) >= exact.INF


def test_checksums_are_those_of_the_cpu() -> None:
    torch.manual_seed(3)
    tensors = [(i, torch.randn(shape)) for i, shape in enumerate([(5,), (4097,), (0,), (3, 64, 300), (257, 1023)])]
    scales, totals = exact._power_of_two(torch.tensor([20, 18, 25, 3, 22])), []
    for device in (torch.device("cpu"), CUDA):
        found = torch.zeros(2, 5, dtype=torch.int64, device=device)
        add_checksums([(i, t.to(device)) for i, t in tensors], found[0], scales.to(device))
        add_checksums([(i, t.to(device).view(torch.int32)) for i, t in tensors], found[1])
        totals.append(found.tolist())
    assert totals[0] == totals[1]


def test_spot_checks_of_a_compiled_run_accuse_nobody(tmp_path: Path) -> None:
    """Two NCCL ranks that share the GPU, a check in every step."""
    words = ["train", "dit", "--exact", "--spot_check_every", "1", "--n_steps", "6", "--log_every", "1"]
    words += ["--batch_size", "8", "--global_batch_size", "40", "--out", "run"]
    port, started = str(free_port()), []
    for rank in ("0", "1"):
        group = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "lockstep", *words],
                cwd=tmp_path,
                env={**os.environ, **group, "NCCL_HOSTID": rank},
            )
        )
    assert [process.wait(500) for process in started] == [0, 0]
    assert [line["corruptions"] for line in lines(tmp_path / "run") if "corruptions" in line] == [0] * 6


@pytest.mark.parametrize("recipe", ["dit", "jit", "protein", "scribble", "vision"])
def test_ranks_that_share_a_gpu_have_the_same_bits(recipe: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lockstep", "verify", recipe, "--bits", "--device", "cuda", "--worlds", "1,2,3"]
    done = subprocess.run([*words, "--steps", "10"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
