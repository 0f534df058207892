"""One target of logged values, and all of them as one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

PICTURES = (".png", ".gif", ".jpg", ".jpeg")
TEXTS = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".fasta")
MAX_TEXT = 10_000
"""Characters of a text file that are shown."""


def text_of(path: Path) -> str | None:
    """Return the beginning of a text file; None for another kind of file."""
    if path.suffix.lower() not in TEXTS:
        return None
    with path.open(errors="replace") as file:
        return file.read(MAX_TEXT)


class Tracker(ABC):
    """One target of logged values. Any method may raise: `Trackers` catches it.

    `media` gets a file of any kind, and shows it if it is a picture or text; `advance` gets every step (it must cost
    nothing), `status` what the run does between steps; `close` may return a last message.
    """

    retried = False
    """Whether it is tried again at the next log after it has failed."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def media(self, step: int, name: str, path: Path) -> None: ...
    def message(self, text: str) -> None: ...
    def status(self, text: str) -> None: ...
    def advance(self, step: int) -> None: ...
    def close(self) -> str | None: ...


class Trackers:
    """All trackers as one: `trackers` says how to make each, `warn` gets one line for each that fails."""

    def __init__(self, trackers: Mapping[str, Callable[[], Tracker]], warn: Callable[[str], None] = lambda text: None):
        self._warn, self._warned = warn, set[str]()
        self._trackers: dict[str, Tracker] = {}
        for name, make in trackers.items():
            try:
                self._trackers[name] = make()
            except Exception as error:
                self._failed(name, error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, values))

    def media(self, step: int, name: str, path: Path) -> None:
        self._each(lambda tracker: tracker.media(step, name, path))

    def message(self, text: str) -> None:
        self._each(lambda tracker: tracker.message(text))

    def status(self, text: str) -> None:
        self._each(lambda tracker: tracker.status(text))

    def advance(self, step: int) -> None:
        self._each(lambda tracker: tracker.advance(step))

    def close(self) -> None:
        """Close all, then say their last words. A second call does nothing."""
        words: list[str | None] = []
        self._each(lambda tracker: words.append(tracker.close()))
        for text in filter(None, words):
            self.message(text)
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        again = name in self._trackers and self._trackers[name].retried
        if name not in self._warned:
            self._warned.add(name)
            reason = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"{name} {'cannot be written, and is tried again' if again else 'is off'}: {reason}")
        if not again:
            with suppress(Exception):  # of its close, or because it was never made
                self._trackers.pop(name).close()
