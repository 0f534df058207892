"""The probes: what a rank does is written down as it does it. Each file installs those of one subject."""

from collections.abc import Callable

from ..patch import Patches
from ..trace import Recorder
from . import collectives, data, files, precision, randomness, training, waits
from .collectives import keep_store
from .context import Context

__all__ = ["Patches", "install", "keep_store"]


def install(recorder: Recorder, limit: int = 0, on_limit: Callable[[], None] | None = None) -> Patches:
    """Watch this process from now on; `undo` of what comes back ends it. `limit` steps lead to `on_limit`."""
    patches = Patches()
    context = Context(recorder, limit, on_limit)
    for subject in (collectives, training, data, randomness, precision, files, waits):
        subject.install(context, patches)
    return patches
