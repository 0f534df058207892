"""Ranks that share one GPU see a GPU each. Fake tensors stand in for the GPU here."""

import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from lockstep.audit.emulate import shared_gpu
from lockstep.audit.events import Device
from lockstep.audit.patch import Patches
from lockstep.audit.recorder import Recorder, decode

FIRST = torch.device("cuda", 0)


class Calls(list[Any]):
    """The arguments of all calls of the functions of torch that it replaces."""

    def returning(self, answer: Any) -> Any:
        return lambda *args, **kwargs: self.append((*args, *kwargs.values())) or answer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    for owner, names in (
        (torch.cuda, {"device_count": 1, "set_device": None, "current_device": 0, "get_rng_state": torch.zeros(1)}),
        (torch.accelerator, {"device_count": 1, "set_device_index": None, "current_device_index": 0}),
        (torch, {"load": {}}),
        (dist, {"init_process_group": None, "barrier": None}),
        (DistributedDataParallel, {"__init__": None}),
    ):
        for name, answer in names.items():
            real = getattr(owner, name)
            monkeypatch.setattr(owner, name, functools.wraps(real)(calls.returning(answer)))
    return calls


@pytest.fixture
def recorder(tmp_path: Path, calls: Calls) -> Iterator[Recorder]:
    """Of a rank that sees three GPUs, on a machine with one."""
    recorder, patches = Recorder(tmp_path, 1), Patches()
    shared_gpu.install(recorder, patches, 3)
    yield recorder
    patches.undo()
    recorder.file.close()


def requests(recorder: Recorder) -> list[tuple[str, int]]:
    events = decode((recorder.folder / "rank1.jsonl").read_text())
    return [(event.op, event.index) for event in events if isinstance(event, Device)]


WAYS = {
    "a name": lambda: torch.zeros(2, device="cuda:1"),
    "a device": lambda: torch.randn(2, device=torch.device("cuda", 1)),
    "a number": lambda: torch.ones(2, device=1),
    "to a number": lambda: torch.ones(2).to(1),
    "to a name and a type": lambda: torch.ones(2).to("cuda:1", torch.float16),
    "to, by keyword": lambda: torch.ones(2).to(device=1, non_blocking=True),
    "cuda": lambda: torch.ones(2).cuda(1),
    "cuda, by keyword": lambda: torch.ones(2).cuda(device="cuda:1", non_blocking=True),
    "like another": lambda: torch.zeros_like(torch.ones(2), device="cuda:1"),
    "of another": lambda: torch.ones(2).new_zeros(2, device="cuda:1"),
    "a module made there": lambda: nn.LayerNorm(2, device="cuda:1").weight,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_requested_gpu_is_the_first(way: str, recorder: Recorder) -> None:
    with FakeTensorMode():
        assert WAYS[way]().device == FIRST
    assert requests(recorder) == [("use", 1)]


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_module_is_moved_to_the_first(device: Any, recorder: Recorder) -> None:
    assert torch._C._nn._parse_to(device)[0] == FIRST  # called first by Module.to; fake modules cannot be moved
    assert requests(recorder) == [("use", 1)]


def test_cuda_without_an_index_is_the_current_device(recorder: Recorder, calls: Calls) -> None:
    torch.cuda.set_device("cuda:2")
    assert calls == [(FIRST,)] and torch.cuda.current_device() == 2 == torch.accelerator.current_device_index()
    with FakeTensorMode():
        assert torch.ones(2).cuda().device == FIRST
    assert requests(recorder) == [("set_device", 2), ("use", 2)]


def test_the_default_device_is_the_first(recorder: Recorder) -> None:
    with torch.device("cuda:2"), FakeTensorMode():
        assert torch.zeros(2).device == FIRST
    torch.set_default_device("cuda:1")
    try:
        with FakeTensorMode():
            assert torch.zeros(2).device == FIRST
    finally:
        torch.set_default_device(None)
    assert requests(recorder) == [("use", 2), ("use", 1)]


def test_the_gpu_of_cuda_visible_devices_is_the_first(
    recorder: Recorder, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA is initialised while the first is still visible."""
    before, seen = os.environ.get("CUDA_VISIBLE_DEVICES"), list[Any]()
    monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert seen == [before] and torch.cuda.device_count() == 1


def test_the_device_of_another_tensor_is_no_new_request(recorder: Recorder) -> None:
    with FakeTensorMode():
        x = torch.ones(2, device="cuda:1")
        assert torch.zeros(2, device=x.device).device == FIRST
    assert requests(recorder) == [("use", 1)]


def test_a_thread_of_the_script_uses_the_first_too(recorder: Recorder) -> None:
    found: list[Tensor] = []

    def fetch() -> None:
        with FakeTensorMode():
            found.append(torch.ones(2).to("cuda:2"))

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    assert found[0].device == FIRST and requests(recorder) == [("use", 2)]


def test_the_script_sees_as_many_gpus_as_ranks(recorder: Recorder) -> None:
    assert torch.cuda.device_count() == 3 == torch.accelerator.device_count()


def test_a_device_object_keeps_its_index(recorder: Recorder) -> None:
    assert torch.device(type="cuda", index=2) == torch.device("cuda:2") and requests(recorder) == []


def test_a_context_manager_changes_the_current_device(recorder: Recorder) -> None:
    with FakeTensorMode(), torch.cuda.device(2):
        assert torch.cuda.current_device() == 2 and torch.ones(2).cuda().device == FIRST
    with torch.accelerator.device_index(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0 and requests(recorder) == [("use", 2)]


def test_a_gpu_that_the_script_names_is_a_request_though_tensors_are_on_it(recorder: Recorder) -> None:
    torch.cuda.set_device(1)
    with FakeTensorMode():
        torch.ones(2, device=torch.device("cuda", 0))  # as x.device says
        torch.ones(2).to("cuda:0")
    assert requests(recorder) == [("set_device", 1), ("use", 0)]


@pytest.mark.parametrize("library", ["torch/distributed/device_mesh.py", "triton/runtime/jit.py"])
def test_code_that_drives_the_gpu_sees_the_real_devices(library: str, recorder: Recorder, calls: Calls) -> None:
    code = "torch.cuda.set_device(1); answers = torch.cuda.device_count(), torch.cuda.current_device()"
    torch.cuda.set_device(2)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, f"{Path(torch.__file__).parents[1]}/{library}", "exec"), names)
    assert names["answers"] == (1, 0) and calls[:2] == [(FIRST,), (FIRST,)]
    assert requests(recorder) == [("set_device", 2)] and torch.cuda.current_device() == 2


def test_device_arguments_become_the_first(recorder: Recorder, calls: Calls) -> None:
    torch.cuda.get_rng_state(2)
    torch.load("f", map_location={"cuda:0": "cuda:2"})
    torch.load("f", "cuda:1", weights_only=True)
    torch.load("f", map_location=torch.device("cpu"))
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):  # on the first GPU, which this machine lacks
        torch.ones(2).untyped_storage().to(device=torch.device("cuda", 2))
    dist.init_process_group("nccl", device_id=torch.device("cuda:1"))
    dist.barrier(device_ids=[2])
    assert calls == [
        (0,),
        ("f", {"cuda:0": "cuda:0"}),
        ("f", "cuda:0", True),
        ("f", torch.device("cpu")),
        ("nccl", FIRST),
        ([0],),
    ]
    assert torch._utils._get_device_index(2) == 0 and torch._utils._get_device_index("cpu", allow_cpu=True) == -1
    assert torch.cuda.memory._get_device_index(1) == 0


def test_generators_keep_their_type(recorder: Recorder) -> None:
    assert isinstance(torch.default_generator, torch.Generator)
    one = torch.Generator().manual_seed(5)
    assert isinstance(one, torch.Generator) and one.device.type == "cpu"
    with pytest.raises(RuntimeError, match="cuda"):  # on the first GPU, which this machine lacks
        torch.Generator("cuda:2")


def test_ddp_is_given_the_first_and_the_request_is_recorded(recorder: Recorder, calls: Calls) -> None:
    DistributedDataParallel(nn.Linear(2, 2), device_ids=[2], output_device=2, broadcast_buffers=False)
    assert calls[0][2:] == ([0], 0, False) and requests(recorder) == [("device_ids", 2)]


def test_a_compiled_function_has_no_graph_break(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compiled = torch.compile(lambda x: model(x.to("cpu")) + torch.zeros(4), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), model(x))


def test_undo_restores_every_function(tmp_path: Path) -> None:
    before = (torch.cuda.device_count, torch.Generator, torch.load, threading.Thread._bootstrap_inner)
    recorder, patches = Recorder(tmp_path, 0), Patches()
    shared_gpu.install(recorder, patches, 2)
    patches.undo()
    recorder.file.close()
    assert (torch.cuda.device_count, torch.Generator, torch.load, threading.Thread._bootstrap_inner) == before
    assert torch.overrides._get_current_function_mode() is None
