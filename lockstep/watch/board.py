"""What the ranks publish about themselves: small messages in the store of the process group, with deadlines.

A call of the store blocks for ever when the process that holds it is stopped or cut off. While one is stuck, no other
is tried.
"""

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ..distributed import Answer, answer_within
from .diagnosis import RankState

_DEADLINE = 3.0
_numbers = itertools.count()


class Board:
    """The states of all ranks. Ranks that make their boards in the same order share them."""

    def __init__(self, store: Any, size: int):
        self._store = dist.PrefixStore(f"hang/{next(_numbers)}", store.clone())
        self._size = size
        self._pending = False
        """Whether a call has not come back yet."""
        self.answers = True
        """Whether the last call was answered."""

    def post(self, state: RankState, key: str = "state") -> None:
        """Publish the state of this rank."""
        text = json.dumps(state.to_json())
        self._call(lambda: self._store.set(f"{key}/{state.rank}", text))

    def read(self, key: str = "state") -> dict[int, RankState]:
        """Return what the ranks have published."""
        return self._call(lambda: self._read(key)) or {}

    def _read(self, key: str) -> dict[int, RankState]:
        keys = {rank: f"{key}/{rank}" for rank in range(self._size)}
        found = {rank: self._store.get(name) for rank, name in keys.items() if self._store.check([name])}
        return {rank: RankState.from_json(json.loads(text)) for rank, text in found.items()}

    def announce(self, what: str) -> None:
        """Tell all ranks something that stays true."""
        self._call(lambda: self._store.set(what, "yes"))

    def is_announced(self, what: str) -> bool:
        return bool(self._call(lambda: self._store.check([what])))

    def _call(self, call: Callable[[], Answer]) -> Answer | None:
        if self._pending:
            return None
        self._pending, self.answers = True, False

        def ask() -> Answer:
            try:
                return call()
            finally:
                self._pending = False

        with suppress(Exception):  # no answer in time, or no store any more
            answer = answer_within(_DEADLINE, ask)
            self.answers = True
            return answer
        return None
