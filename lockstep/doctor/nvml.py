"""The driver's own library, where nvidia-ml-py is installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def nvml() -> Iterator[Any]:
    """Yield the module pynvml, initialised; ImportError or its own error where there is none."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
