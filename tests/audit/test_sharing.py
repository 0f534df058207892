"""Ranks that share one GPU believe that each has its own. What is asked of torch here is answered with fake tensors."""

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

from lockstep.audit import mapping, sharing
from lockstep.audit.events import Device
from lockstep.audit.probes.patch import Patches
from lockstep.audit.recorder import Recorder, decode

FIRST = torch.device("cuda", 0)


class Told(list[Any]):
    """What the real functions of torch were told, in the place of a GPU that would do it."""

    def instead(self, answer: Any) -> Any:
        return lambda *args, **kwargs: self.append((*args, *kwargs.values())) or answer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    for owner, names in (
        (torch.cuda, {"device_count": 1, "set_device": None, "current_device": 0, "get_rng_state": torch.zeros(1)}),
        (torch.accelerator, {"device_count": 1, "set_device_index": None, "current_device_index": 0}),
        (torch, {"load": {}}),
        (dist, {"init_process_group": None, "barrier": None}),
    ):
        for name, answer in names.items():
            monkeypatch.setattr(owner, name, told.instead(answer))
    return told


@pytest.fixture
def recorder(tmp_path: Path, told: Told) -> Iterator[Recorder]:
    """Of a rank on a machine of three GPUs, of which one is there."""
    recorder, patches = Recorder(tmp_path, 1), Patches()
    sharing.install(recorder, patches, 3)
    yield recorder
    patches.undo()
    recorder.file.close()


def asked(recorder: Recorder) -> list[tuple[str, int]]:
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
def test_whichever_gpu_is_asked_for_is_the_first(way: str, recorder: Recorder) -> None:
    with FakeTensorMode():
        assert WAYS[way]().device == FIRST
    assert asked(recorder) == [("use", 1)]


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_module_is_moved_to_the_first(device: Any, recorder: Recorder) -> None:
    assert torch._C._nn._parse_to(device)[0] == FIRST  # with which Module.to begins; fake ones cannot be moved
    assert asked(recorder) == [("use", 1)]


def test_without_a_number_it_is_the_one_that_was_set(recorder: Recorder, told: Told) -> None:
    torch.cuda.set_device("cuda:2")
    assert told == [(FIRST,)] and torch.cuda.current_device() == 2 == torch.accelerator.current_device_index()
    with FakeTensorMode():
        assert torch.ones(2).cuda().device == FIRST
    assert asked(recorder) == [("set_device", 2), ("use", 2)]


def test_a_device_by_default_is_the_first(recorder: Recorder) -> None:
    with torch.device("cuda:2"), FakeTensorMode():
        assert torch.zeros(2).device == FIRST
    torch.set_default_device("cuda:1")
    try:
        with FakeTensorMode():
            assert torch.zeros(2).device == FIRST
    finally:
        torch.set_default_device(None)
    assert asked(recorder) == [("use", 2), ("use", 1)]


def test_on_the_cpu_a_device_by_default_and_threads_are_mapped_too(tmp_path: Path) -> None:
    recorder, patches, found = Recorder(tmp_path, 1), Patches(), list[Tensor]()
    mapping.install(recorder, patches, 2)
    with torch.device("cuda:1"):
        found.append(torch.zeros(2))
    thread = threading.Thread(target=lambda: found.append(torch.zeros(2).to("cuda:1").cuda()))
    thread.start()
    thread.join()
    patches.undo()
    recorder.file.close()
    assert [t.device.type for t in found] == ["cpu", "cpu"] and asked(recorder) == [("use", 1), ("use", 0)]


def test_a_gpu_made_visible_to_each_rank_is_the_first(
    recorder: Recorder, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA is started while the first can still be seen."""
    before, seen = os.environ.get("CUDA_VISIBLE_DEVICES"), list[Any]()
    monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert seen == [before] and torch.cuda.device_count() == 1


def test_a_tensor_beside_another_asks_for_nothing_new(recorder: Recorder) -> None:
    with FakeTensorMode():
        x = torch.ones(2, device="cuda:1")
        assert torch.zeros(2, device=x.device).device == FIRST
    assert asked(recorder) == [("use", 1)]


def test_a_thread_of_the_script_is_on_the_first_too(recorder: Recorder) -> None:
    found: list[Tensor] = []

    def fetch() -> None:
        with FakeTensorMode():
            found.append(torch.ones(2).to("cuda:2"))

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    assert found[0].device == FIRST and asked(recorder) == [("use", 2)]


def test_the_script_counts_as_many_gpus_as_ranks(recorder: Recorder) -> None:
    assert torch.cuda.device_count() == 3 == torch.accelerator.device_count()


def test_a_device_that_is_only_named_is_what_it_is_called(recorder: Recorder) -> None:
    assert torch.device(type="cuda", index=2) == torch.device("cuda:2") and asked(recorder) == []


def test_a_gpu_for_a_while(recorder: Recorder) -> None:
    with FakeTensorMode(), torch.cuda.device(2):
        assert torch.cuda.current_device() == 2 and torch.ones(2).cuda().device == FIRST
    with torch.accelerator.device_index(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0 and asked(recorder) == [("use", 2)]


def test_a_gpu_that_is_named_by_the_script_counts_though_tensors_are_there(recorder: Recorder) -> None:
    torch.cuda.set_device(1)
    with FakeTensorMode():
        torch.ones(2, device=torch.device("cuda", 0))  # as x.device says
        torch.ones(2).to("cuda:0")
    assert asked(recorder) == [("set_device", 1), ("use", 0)]


class Doubled(torch.autograd.Function):
    """Whose backward pass makes tensors on the device of its rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        PLACES.append(torch.empty(2, device="cuda:1").device.type)
        return 2 * grad


PLACES: list[str] = []


@pytest.mark.parametrize("by", ["Tensor.backward", "autograd.backward", "autograd.grad"])
def test_what_runs_in_the_backward_pass_is_mapped_too(tmp_path: Path, by: str) -> None:
    recorder, patches = Recorder(tmp_path, 1), Patches()
    mapping.install(recorder, patches, 2)
    PLACES.clear()
    x = torch.ones(2, requires_grad=True)
    loss = Doubled.apply(x).sum()
    {
        "Tensor.backward": loss.backward,
        "autograd.backward": lambda: torch.autograd.backward(loss),
        "autograd.grad": lambda: torch.autograd.grad(loss, x),
    }[by]()
    patches.undo()
    recorder.file.close()
    assert PLACES == ["cpu"]


@pytest.mark.parametrize("library", ["torch/distributed/device_mesh.py", "triton/runtime/jit.py"])
def test_who_drives_the_gpu_knows_how_things_are(library: str, recorder: Recorder, told: Told) -> None:
    code = "torch.cuda.set_device(1); answers = torch.cuda.device_count(), torch.cuda.current_device()"
    torch.cuda.set_device(2)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, f"{Path(torch.__file__).parents[1]}/{library}", "exec"), names)
    assert names["answers"] == (1, 0) and told[:2] == [(FIRST,), (FIRST,)]
    assert asked(recorder) == [("set_device", 2)] and torch.cuda.current_device() == 2


def test_numbers_of_devices_are_said_of_the_first(recorder: Recorder, told: Told) -> None:
    torch.cuda.get_rng_state(2)
    torch.load("f", map_location={"cuda:0": "cuda:2"})
    torch.load("f", "cuda:1", weights_only=True)
    torch.load("f", map_location=torch.device("cpu"))
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):  # of the first, which is not there
        torch.ones(2).untyped_storage().to(device=torch.device("cuda", 2))
    dist.init_process_group("nccl", device_id=torch.device("cuda:1"))
    dist.barrier(device_ids=[2])
    assert told == [
        (0,),
        ("f", {"cuda:0": "cuda:0"}),
        ("f", "cuda:0", True),
        ("f", torch.device("cpu")),
        ("nccl", FIRST),
        ([0],),
    ]
    assert torch._utils._get_device_index(2) == 0 and torch._utils._get_device_index("cpu", allow_cpu=True) == -1
    assert torch.cuda.memory._get_device_index(1) == 0


def test_generators_are_what_they_were(recorder: Recorder) -> None:
    assert isinstance(torch.default_generator, torch.Generator)
    one = torch.Generator().manual_seed(5)
    assert isinstance(one, torch.Generator) and one.device.type == "cpu"
    with pytest.raises(RuntimeError, match="cuda"):  # asked for on the first GPU, which is not there
        torch.Generator("cuda:2")


def test_ddp_is_told_the_first_and_what_was_asked_is_kept(recorder: Recorder) -> None:
    told, patches, chosen = Told(), Patches(), sharing.Devices(recorder, FIRST, 3)
    patches.wrap(nn.parallel.DistributedDataParallel, "__init__", lambda _: sharing._ddp(told.instead(None), chosen))
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2), device_ids=[2], output_device=2, broadcast_buffers=False)
    patches.undo()
    assert told[0][2:] == ([0], 0, False) and asked(recorder) == [("device_ids", 2)]


def test_a_compiled_function_stays_whole(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compiled = torch.compile(lambda x: model(x.to("cpu")) + torch.zeros(4), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), model(x))


def test_undone_all_is_as_before(tmp_path: Path) -> None:
    before = (torch.cuda.device_count, torch.Generator, torch.load, threading.Thread._bootstrap_inner)
    recorder, patches = Recorder(tmp_path, 0), Patches()
    sharing.install(recorder, patches, 2)
    patches.undo()
    recorder.file.close()
    assert (torch.cuda.device_count, torch.Generator, torch.load, threading.Thread._bootstrap_inner) == before
    assert torch.overrides._get_current_function_mode() is None
