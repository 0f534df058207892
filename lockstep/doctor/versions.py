"""Python, torch, CUDA, the driver and NCCL, and whether they fit together."""

import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from .check import Result, green, red, yellow
from .nvml import nvml

_PYTHONS = ((3, 11), (3, 14))
"""The first version that works, and the first that does not."""
_TORCH = (2, 11)
_DATA_SHEET = "install torch for that version (pytorch.org, Get started), or a newer driver"


@dataclass(frozen=True)
class Versions:
    """What is installed, and what the GPUs want."""

    python: tuple[int, int]
    torch: str
    cuda: str | None
    """What torch was built with; None for a CPU build."""
    nccl: str | None
    gpus_in_machine: int
    gpus_of_torch: int
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    capabilities: tuple[tuple[int, int], ...] = ()
    architectures: tuple[str, ...] = ()
    """What torch has kernels for."""


def read() -> Versions:
    """Return the versions on this machine."""
    count = torch.cuda.device_count()
    driver, driver_cuda, in_machine = None, None, len([*Path("/proc/driver/nvidia/gpus").glob("*")])
    with suppress(Exception), nvml() as found:
        driver, number = str(found.nvmlSystemGetDriverVersion()), found.nvmlSystemGetCudaDriverVersion()
        driver_cuda, in_machine = (number // 1000, number % 1000 // 10), found.nvmlDeviceGetCount()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    return Versions(
        python=(int(platform.python_version_tuple()[0]), int(platform.python_version_tuple()[1])),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=nccl,
        gpus_in_machine=max(in_machine, count),
        gpus_of_torch=count,
        driver=driver,
        driver_cuda=driver_cuda,
        capabilities=tuple(torch.cuda.get_device_capability(i) for i in range(count)),
        architectures=tuple(torch.cuda.get_arch_list()) if count else (),
    )


def check(found: Versions) -> list[Result]:
    return [_python(found), _torch(found), _cuda(found), *_kernels(found), *_nccl(found)]


def _python(found: Versions) -> Result:
    text = ".".join(map(str, found.python))
    first, end = (".".join(map(str, version)) for version in _PYTHONS)
    if not _PYTHONS[0] <= found.python < _PYTHONS[1]:
        return red(
            "Python", f"{text}; Lockstep runs on {first} and newer, below {end}", f"make a venv with Python {first}"
        )
    return green("Python", text)


def _torch(found: Versions) -> Result:
    numbers = tuple(int(part) for part in found.torch.split("+")[0].split(".")[:2] if part.isdigit())
    wanted = ".".join(map(str, _TORCH))
    if numbers < _TORCH:
        return red("torch", f"{found.torch} is older than {wanted}", f"pip install 'torch>={wanted}'")
    return green("torch", found.torch)


def _cuda(found: Versions) -> Result:
    if not found.gpus_in_machine and not found.gpus_of_torch:
        return green("CUDA", "no NVIDIA GPU in this machine: runs use the CPU and gloo")
    if found.cuda is None:
        remedy = "install a build of torch with CUDA (pytorch.org, Get started)"
        return red("CUDA", f"the machine has a GPU, but torch {found.torch} is a build for CPUs", remedy)
    built = tuple(int(part) for part in found.cuda.split(".")[:2])
    driver = f"driver {found.driver or 'unknown'}"
    if found.driver_cuda is not None:
        newest = ".".join(map(str, found.driver_cuda))
        if found.driver_cuda[0] < built[0]:
            what = f"torch was built for CUDA {found.cuda}, and {driver} runs CUDA up to {newest}"
            return red("CUDA", what, _DATA_SHEET)
        driver += f" (CUDA up to {newest})"
    if not found.gpus_of_torch:
        remedy = "see CUDA_VISIBLE_DEVICES below; in a container, start it with the GPUs (--gpus all); try nvidia-smi"
        return red("CUDA", f"the machine has {found.gpus_in_machine} GPU(s), and torch sees none ({driver})", remedy)
    return green("CUDA", f"{found.cuda}, {driver}")


def _kernels(found: Versions) -> list[Result]:
    if not found.capabilities or not found.architectures:
        return []
    numbers = [(name.partition("_")[0], int(name.partition("_")[2].rstrip("af"))) for name in found.architectures]
    wanted = {10 * major + minor for major, minor in found.capabilities}
    # Kernels run on the same major version with a minor one at least as high; PTX is compiled for whatever is newer.
    missing = {
        w for w in wanted if not any(n <= w and (kind == "compute" or n // 10 == w // 10) for kind, n in numbers)
    }
    if missing:
        names = ", ".join(f"sm_{number}" for number in sorted(missing))
        return [red("kernels", f"torch {found.torch} has no kernels for {names}", _DATA_SHEET)]
    if any(number < 80 for number in wanted):
        return [yellow("kernels", "a GPU without bf16 (before Ampere)", "--precision fp16, if bf16 is slow")]
    return [green("kernels", ", ".join(f"sm_{number}" for number in sorted(wanted)))]


def _nccl(found: Versions) -> list[Result]:
    if not found.gpus_of_torch:
        return []
    if found.nccl is None:
        return [red("NCCL", "torch was built without it", "install torch from its own wheels: they contain NCCL")]
    return [green("NCCL", found.nccl)]
