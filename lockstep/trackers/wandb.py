"""Weights & Biases, offline unless WANDB_MODE says otherwise."""

import html
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from .tracker import PICTURES, Tracker, text_of


class Wandb(Tracker):
    """A run in `folder`/wandb, offline unless WANDB_MODE says otherwise; an earlier part's `run_id` makes it go on."""

    limits: ClassVar[dict[str, Any]] = {"init_timeout": 30.0, "finish_timeout": 300.0, "finish_timeout_raises": True}

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, Any], run_id: str | None = None):
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its telemetry looks for a network, even offline
        try:  # names, not the module: a folder `wandb` in the working directory imports as an empty package
            from wandb import Html, Image, Settings, Video, init, setup, teardown
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lockstep-train[wandb]'") from error
        self._image, self._video, self._html, self._teardown = Image, Video, Html, teardown
        limits = {key: value for key, value in self.limits.items() if key in Settings.model_fields}  # 0.19 has fewer
        identity: dict[str, Any] = {"dir": str(folder), "project": project, "name": name, "id": run_id}
        folder.mkdir(parents=True, exist_ok=True)  # else wandb writes to the folder for temporary files
        hook = sys.excepthook
        try:
            setup(Settings(silent=True))  # of the process: with `init` alone it talks, and asks for a login
            settings = Settings(silent=True, console="off", **limits)
            self._run: Any = init(mode=mode, config=dict(config), resume="allow", settings=settings, **identity)
            # wandb's own step can only rise: what is logged again after a resume would be thrown away
            self._run.define_metric("*", step_metric="step")
        except BaseException:
            teardown()
            raise
        finally:
            sys.excepthook = hook  # wandb's own would print every traceback a second time

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def media(self, step: int, name: str, path: Path) -> None:
        if path.suffix.lower() in PICTURES:
            media = self._video if path.suffix.lower() == ".gif" else self._image
            self._run.log({"step": step, name: media(str(path))})
        elif (text := text_of(path)) is not None:
            self._run.log({"step": step, name: self._html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> str | None:
        here = Path(self._run.dir).parent  # wandb/offline-run-DATE_TIME-ID
        parts = here.parent.glob(here.name.split("run-")[0] + f"run-*-{self._run.id}")  # one for each resume
        try:
            self._run.finish(exit_code=int(sys.exc_info()[0] is not None))  # an exception is on its way: it failed
            unsent = self._run.offline
        except TimeoutError:
            unsent = True
        finally:
            self._teardown()
        return "wandb sync " + shlex.join(map(str, sorted(parts))) if unsent else None
