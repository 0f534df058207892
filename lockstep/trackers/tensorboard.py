"""TensorBoard event files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from .tracker import PICTURES, Tracker, text_of


class TensorBoard(Tracker):
    """Event files in `folder`. With `resume_step`, TensorBoard hides what earlier files hold of later steps."""

    def __init__(self, folder: Path, resume_step: int | None = None):
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"{error}; pip install 'lockstep-train[tensorboard]'") from error
        self._summary = Summary
        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def media(self, step: int, name: str, path: Path) -> None:
        if (text := text_of(path)) is not None:
            self._writer.add_text(name, text, step)
        if path.suffix.lower() not in PICTURES:
            return
        # The file's own bytes rather than `add_image`: nothing is encoded again, and a GIF moves.
        with Image.open(path) as image:
            width, height = image.size
        data = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
        self._writer.file_writer.add_summary(self._summary(value=[self._summary.Value(tag=name, image=data)]), step)

    def close(self) -> None:
        self._writer.close()
