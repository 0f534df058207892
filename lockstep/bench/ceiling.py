"""What the device could do: the rate of its fastest matrix product, and the operations that a step takes."""

import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .workloads import Work


def measure(work: Work) -> dict[str, float]:
    """Return `peak`, operations per second of a large product in the precision of the run, and `step`, those of a step.

    A multiplication and an addition are two. What is computed again, or outside products and convolutions, is left out.
    """
    return {"peak": _peak(work), "step": float(_operations(work))}


def _peak(work: Work) -> float:
    on_gpu = work.device.type == "cuda"
    size = 8192 if on_gpu else 1024
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(work.precision.name, work.precision.dtype)
    a, b = (torch.randn(size, size, device=work.device).to(kind) for _ in range(2))  # zeros would run faster
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(10 if on_gpu else 1):
            torch.mm(a, b)
        if on_gpu:
            torch.cuda.synchronize(work.device)
        seconds.append((time.perf_counter() - began) / (10 if on_gpu else 1))
    return 2.0 * size**3 / statistics.median(seconds)


def _operations(work: Work) -> int:
    batch, index = work.to_device(next(iter(work.loader())))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # attention as products, all counted
        with work.precision.autocast:
            loss = work.loss(work.objective, batch, index)
        loss.backward()
    return int(counter.get_total_flops())
