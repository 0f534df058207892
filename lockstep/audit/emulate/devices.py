"""The GPUs that a script requests, and the one device that replaces them all."""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..events import Device
from ..patch import Arguments, Function, Patches
from ..recorder import Recorder

FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
DEVICE_FUNCTIONS = (
    (torch.cuda, "device_count", "set_device", "current_device", "device"),
    (torch.accelerator, "device_count", "set_device_index", "current_device_index", "device_index"),
)
"""Where PyTorch counts the GPUs, sets the current one, returns its index, and changes it within a `with`."""


class VirtualGpus:
    """The GPUs that a rank is told it has; those it requests are recorded."""

    def __init__(self, recorder: Recorder, target: torch.device, count: int):
        self.recorder, self.count = recorder, count
        self.target = target  # the device that is used in their stead
        self.current, self.is_set = 0, False
        self.used: set[int] = set()

    def record(self, op: str, index: int) -> None:
        self.recorder.on_gpu |= self.target.type == "cpu"  # on a real GPU the tensors' devices show it
        self.recorder.write(Device(op, index))

    def set_current(self, device: Any) -> None:
        self.current, self.is_set = self.index(device), True
        self.record("set_device", self.current)

    def record_use(self, device: Any) -> None:
        index = self.index(device)
        read_from_tensor = index == self.target.index and not isinstance(device, str)
        if read_from_tensor and (self.current or self.used - {index}):
            return  # as in torch.zeros(2, device=x.device): the script requests no GPU by its index
        if index not in self.used:
            self.used.add(index)
            self.record("use", index)

    def context_manager(self, applies: Callable[[], bool]) -> type:
        """Return the class that replaces `torch.cuda.device`; without effect for callers to whom it does not apply."""
        gpus = self

        class CurrentDevice:
            def __init__(self, device: Any = None):
                self.index = gpus.index(device) if device is not None and applies() else gpus.current

            def __enter__(self) -> None:
                self.previous, gpus.current = gpus.current, self.index

            def __exit__(self, *_: object) -> None:
                gpus.current = self.previous

        return CurrentDevice

    def index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return self.current if index is None else index


def is_cuda(value: Any) -> bool:
    return isinstance(value, (torch.device, str)) and str(value).split(":")[0] == "cuda"


def redirect_load(patches: Patches, redirect: Callable[[Any], Any]) -> None:
    """Let torch.load and torch.Generator use the device that `redirect` returns for the one they are given."""

    def load(arguments: Arguments) -> None:
        arguments["map_location"] = redirect(arguments.get("map_location"))

    class AnyGenerator(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, torch._C.Generator)

    class Generator(metaclass=AnyGenerator):
        def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
            return torch._C.Generator(redirect(device))

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"  # pickle finds the class by its name
    patches.edit_arguments(torch, "load", load)
    patches.replace(torch, "Generator", Generator)


def redirect_ddp(
    patches: Patches, gpus: VirtualGpus, redirect: Callable[[Any], Any], is_request: Callable[[Any], bool]
) -> None:
    """Let DDP use the device that `redirect` returns; record its first device id, if that is a request."""

    def init(arguments: Arguments) -> None:
        device_ids = arguments.get("device_ids")
        if device_ids and is_request(device_ids[0]):
            gpus.record("device_ids", gpus.index(device_ids[0]))
        arguments.update(device_ids=redirect(device_ids), output_device=redirect(arguments.get("output_device")))

    patches.edit_arguments(DistributedDataParallel, "__init__", init)


class DeviceRedirect(TorchFunctionMode):
    """Every torch function that is told to use a GPU uses the target device."""

    def __init__(self, gpus: VirtualGpus):
        super().__init__()
        self.gpus = gpus

    def install(self, patches: Patches) -> None:
        """Redirect this thread, the threads that it starts, and what runs in the backward pass."""
        self.__enter__()
        patches.later(lambda: self.__exit__(None, None, None))
        patches.intercept(threading.Thread, "_bootstrap_inner", self._in_this_mode)
        patches.intercept(torch.autograd, "_engine_run_backward", self._in_this_mode)
        patches.intercept(DeviceContext, "__init__", self._default_device)
        patches.edit_arguments("torch.distributed.device_mesh:DeviceMesh", "__init__", self._mesh)

    def _in_this_mode(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """A mode is off in other threads, and in functions that it calls itself, like `Tensor.backward`."""
        if any(isinstance(mode, DeviceRedirect) for mode in _get_current_function_mode_stack()):
            return original(*args, **kwargs)
        with type(self)(self.gpus):
            return original(*args, **kwargs)

    def _default_device(self, original: Function, context: Any, device: Any) -> None:
        """`set_default_device` and `with torch.device(…)` are modes above this one."""
        if type(device) is int or is_cuda(device):
            self.gpus.record_use(device)
            device = self.gpus.target
        original(context, device)

    def _mesh(self, arguments: Arguments) -> None:
        """A mesh sets the GPU of its local rank, unless the script has set or used one."""
        if arguments["device_type"] == "cuda":
            if not self.gpus.used and not self.gpus.is_set:
                self.gpus.set_current(int(os.environ.get("LOCAL_RANK", "0")))
            arguments["device_type"] = self.gpus.target.type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:  # named, not used yet
            return func(*args, **kwargs)
        name, target = getattr(func, "__name__", ""), self.gpus.target
        if name == "cuda":
            self.gpus.record_use(args[1] if len(args) > 1 else kwargs.get("device"))
            others = {k: v for k, v in kwargs.items() if k != "device"}
            return func(args[0], target, *args[2:], **others) if target.type == "cuda" else args[0]
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": _device(kwargs["device"])}
        first = 1
        if name == "_parse_to":  # the arguments of Module.to
            first, args = 0, tuple(_device(a) if type(a) is int else a for a in args)
        elif name == "to" and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _device(args[1]), *args[2:])
        device = next((a for a in (*args[first:], *kwargs.values()) if is_cuda(a)), None)
        if device is not None:
            self.gpus.record_use(device)
            args = tuple(target if is_cuda(a) else a for a in args)
            kwargs = {k: target if is_cuda(v) else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _device(index: int) -> torch.device:
    """Return the device that PyTorch means by an index; a tensor on the CPU has the index -1."""
    return torch.device("cuda", index) if index >= 0 else torch.device("cpu")
