"""Find the silent bugs of any distributed training script.

`lockstep audit -- train.py` on the command line; `watch()` in a script of your own; `assert_in_lockstep` in a test.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .library import assert_in_lockstep, watch

__all__ = ["assert_in_lockstep", "watch"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the command's --help needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import library

    return getattr(library, name)
