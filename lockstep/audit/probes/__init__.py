"""The probes: functions of torch replaced by ones that record what the script does. Each file has one subject."""

from collections.abc import Callable

from ..patch import Patches
from ..recorder import Recorder
from . import averages, collectives, data, files, precision, randomness, steps, training, waits
from .collectives import keep_store
from .context import Context

__all__ = ["Patches", "install", "keep_store"]


def install(
    recorder: Recorder,
    limit: int = 0,
    on_limit: Callable[[], None] | None = None,
    in_detail: bool = False,
    stop_at_save: int | None = None,
) -> Patches:
    """Watch this process from now on; `undo` of the result ends it. `limit` steps lead to `on_limit`.

    `in_detail` and `stop_at_save` are for runs that are compared, see steps.py.
    """
    context = Context(recorder, Patches(), limit, on_limit)
    for subject in (collectives, training, averages, data, randomness, precision, files, waits):
        subject.install(context)
    if in_detail:
        steps.install(context, stop_at_save)
    return context.patches
