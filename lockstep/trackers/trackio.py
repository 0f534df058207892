"""Trackio: a project in a folder of the run, or where TRACKIO_DIR says; nothing leaves the machine."""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from .tracker import PICTURES, Tracker, text_of


@contextmanager
def _folder_unless_given(folder: Path) -> Iterator[None]:
    """Set TRACKIO_DIR during the block, in which trackio is imported: it reads it once in a process."""
    if "TRACKIO_DIR" in os.environ:
        yield
        return
    os.environ["TRACKIO_DIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["TRACKIO_DIR"]


class Trackio(Tracker):
    """A run of `project` named `name`; a run of that name that is there already goes on."""

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, Any]):
        try:
            with _folder_unless_given((folder / "trackio").resolve()):
                import trackio
                from trackio.sqlite_storage import TRACKIO_DIR
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lockstep-train[trackio]'") from error
        self._trackio: Any = trackio
        self._where = str(TRACKIO_DIR)
        with redirect_stdout(StringIO()):  # it talks
            self._run = trackio.init(
                project=project, name=name, config=dict(config), resume="allow", auto_log_gpu=False, auto_log_cpu=False
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def media(self, step: int, name: str, path: Path) -> None:
        if path.suffix.lower() in PICTURES and path.suffix.lower() != ".gif":
            self._run.log({name: self._trackio.Image(str(path))}, step=step)
        elif (text := text_of(path)) is not None:
            self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```")}, step=step)

    def close(self) -> str | None:
        with redirect_stdout(StringIO()):
            self._run.finish()
        return f"TRACKIO_DIR={shlex.quote(self._where)} trackio show"
