"""A script that requests GPUs runs on the CPU, and its requests are recorded."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audit.emulate.test_shared_gpu import requests
from lockstep.audit.emulate import cuda_on_cpu
from lockstep.audit.patch import Patches
from lockstep.audit.recorder import Recorder


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """Of a rank that sees two GPUs."""
    recorder, patches = Recorder(tmp_path, 1), Patches()
    cuda_on_cpu.install(recorder, patches, 2)
    yield recorder
    patches.undo()
    recorder.file.close()


def test_the_default_device_and_threads_are_redirected(recorder: Recorder) -> None:
    created: list[Tensor] = []
    with torch.device("cuda:1"):
        created.append(torch.zeros(2))
    thread = threading.Thread(target=lambda: created.append(torch.zeros(2).to("cuda:1").cuda()))
    thread.start()
    thread.join()
    assert [t.device.type for t in created] == ["cpu", "cpu"] and requests(recorder) == [("use", 1), ("use", 0)]


@pytest.mark.parametrize("index", [1, -1])
def test_a_tensor_moves_to_the_index_of_another_device(recorder: Recorder, index: int) -> None:
    """-1 is what get_device() returns of a tensor that the script moved to a GPU, and that is on the CPU."""
    moved = (torch.ones(2).to(index), torch.ones(2).to(device=index), torch.ones(2, device=index))
    assert [t.device.type for t in moved] == ["cpu"] * 3
    assert requests(recorder) == ([("use", 1)] if index == 1 else [])


class Doubled(torch.autograd.Function):
    """Creates a tensor on the device of its rank in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        DEVICES.append(torch.empty(2, device="cuda:1").device.type)
        return 2 * grad


DEVICES: list[str] = []


@pytest.mark.parametrize("by", ["Tensor.backward", "autograd.backward", "autograd.grad"])
def test_the_backward_pass_is_redirected(recorder: Recorder, by: str) -> None:
    DEVICES.clear()
    x = torch.ones(2, requires_grad=True)
    loss = Doubled.apply(x).sum()
    {
        "Tensor.backward": loss.backward,
        "autograd.backward": lambda: torch.autograd.backward(loss),
        "autograd.grad": lambda: torch.autograd.grad(loss, x),
    }[by]()
    assert DEVICES == ["cpu"]
