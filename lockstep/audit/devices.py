"""The GPUs a script asks for, and another device that takes their place."""

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .events import Device
from .probes.patch import Function, Patches
from .recorder import Recorder


class Devices:
    """Which GPU this rank wants to be on."""

    def __init__(self, recorder: Recorder, place: torch.device, gpus: int):
        self.recorder, self.place = recorder, place
        self.gpus = gpus
        """How many it believes there are."""
        self.current, self.is_set = 0, False
        self.used: set[int] = set()

    def choose(self, device: Any) -> None:
        self._begun()
        self.current, self.is_set = self.index(device), True
        self.recorder.write(Device("set_device", self.current))

    def use(self, device: Any) -> None:
        self._begun()
        index = self.index(device)
        real = index == self.place.index and not isinstance(device, str)
        if real and (self.current or self.used - {index}):
            return  # where a tensor really is, beside which another is made: nothing that was asked for
        if index not in self.used:
            self.used.add(index)
            self.recorder.write(Device("use", index))

    def _begun(self) -> None:
        if self.place.type == "cpu":  # elsewhere a tensor says itself whether it is on a GPU
            self.recorder.on_gpu = True

    def within(self, asks: Callable[[], bool]) -> type:
        """In the place of the context managers that change the device, for those who ask for it."""
        chosen = self

        class Within:
            def __init__(self, device: Any = None):
                self.index = chosen.index(device) if device is not None and asks() else chosen.current

            def __enter__(self) -> None:
                self.before, chosen.current = chosen.current, self.index

            def __exit__(self, *_: object) -> None:
                chosen.current = self.before

        return Within

    def index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        found = torch.device(device).index if device is not None else None
        return self.current if found is None else found


def is_cuda(thing: Any) -> bool:
    return (isinstance(thing, torch.device) and thing.type == "cuda") or (
        isinstance(thing, str) and thing.split(":")[0] == "cuda"
    )


def generator_on(place: Callable[[Any], Any]) -> type:
    """Makes torch's generators, for the devices that stand for those asked for."""

    class AnyGenerator(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, torch._C.Generator)

    class Generator(metaclass=AnyGenerator):
        def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
            return torch._C.Generator(place(device))

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"  # by which one that is pickled is found again
    return Generator


class Instead(TorchFunctionMode):
    """Every torch function that is told to use a GPU uses the place that stands for it."""

    def __init__(self, chosen: Devices):
        super().__init__()
        self.chosen = chosen

    def install(self, patches: Patches) -> None:
        """For this thread and those that it starts, and for what runs in the backward pass."""
        self.__enter__()
        patches.later(lambda: self.__exit__(None, None, None))
        patches.wrap(threading.Thread, "_bootstrap_inner", self._again)
        patches.wrap(torch.autograd, "_engine_run_backward", self._again)
        patches.wrap(DeviceContext, "__init__", self._by_default)
        patches.when_imported(
            "torch.distributed.device_mesh", lambda module: patches.wrap(module.DeviceMesh, "__init__", self._by_mesh)
        )

    def _again(self, original: Function) -> Function:
        """A mode is off in other threads, and in what it calls itself, like `Tensor.backward`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(mode, Instead) for mode in _get_current_function_mode_stack()):
                return original(*args, **kwargs)
            with type(self)(self.chosen):
                return original(*args, **kwargs)

        return call

    def _by_default(self, original: Function) -> Function:
        """For `set_default_device` and `with torch.device(…)`: they come after this mode."""

        def __init__(context: Any, /, device: Any) -> None:
            if type(device) is int or is_cuda(device):
                self.chosen.use(device)
                device = self.chosen.place
            original(context, device)

        return __init__

    def _by_mesh(self, original: Function) -> Function:
        """A mesh takes the GPU of its local rank, if the script has not used one yet."""

        def __init__(mesh: Any, /, device_type: str, *args: Any, **kwargs: Any) -> None:
            if device_type == "cuda":
                if not self.chosen.used and not self.chosen.is_set:
                    self.chosen.choose(int(os.environ.get("LOCAL_RANK", "0")))
                device_type = self.chosen.place.type
            original(mesh, device_type, *args, **kwargs)

        return __init__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:  # named, not used yet
            return func(*args, **kwargs)
        name, place = getattr(func, "__name__", ""), self.chosen.place
        if name == "cuda":
            self.chosen.use(args[1] if len(args) > 1 else kwargs.get("device"))
            given = {k: v for k, v in kwargs.items() if k != "device"}
            return func(args[0], place, *args[2:], **given) if place.type == "cuda" else args[0]
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": self._numbered(kwargs["device"])}
        first = 1
        if name == "_parse_to":  # what Module.to was told
            first, args = 0, tuple(self._numbered(a) if type(a) is int else a for a in args)
        device = next((a for a in (*args[first:], *kwargs.values()) if is_cuda(a)), None)
        if device is not None:
            self.chosen.use(device)
            args = tuple(place if is_cuda(a) else a for a in args)
            kwargs = {k: place if is_cuda(v) else v for k, v in kwargs.items()}
        elif name == "to" and len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
            if args[1] >= 0:
                self.chosen.use(args[1])
            args = (args[0], place, *args[2:])
        return func(*args, **kwargs)

    def _numbered(self, index: int) -> torch.device:
        """-1 is what a tensor on the CPU says of itself."""
        return torch.device("cuda", index) if index >= 0 else torch.device("cpu")
