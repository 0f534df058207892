"""Each rank writes its own file of a checkpoint, in the background; rank 0 writes the manifest of all, and renames.

Rank 0 tells the others the folder when it is there, each writes, flushes and hashes its file, and reports to rank 0 the
entry of the manifest or the error. One error, and the folder does not become a checkpoint. These messages have a group
of their own, so that they mix with no others, and they are sent by threads: training does not wait for them.
"""

import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..distributed import World
from ..files import flush, manifest_entry
from ..pieces import Piece, Pieces, file_name, host_copies, write

SLOWEST = timedelta(hours=1)
"""How much longer than another one a rank may take to write; one that has exited is noticed at once."""


class RankFile:
    """What this rank writes of one checkpoint."""

    def __init__(self, world: World, group: Any, pieces: Pieces):
        self.world, self.group, self.pieces = world, group, pieces
        self._told = False

    def copy(self) -> None:
        """Copy the pieces off the device."""
        copies = host_copies({"": {name: piece.tensor for name, piece in self.pieces.items()}})[""]
        self.pieces = {name: Piece(copies[name], piece.start) for name, piece in self.pieces.items()}

    def write(self, folder: Path, mode: int) -> dict[str, Any]:
        """Have every rank write its file; return, on rank 0, their entries of the manifest. An OSError if one fails."""
        self._tell((str(folder), mode))
        reports: list[Any] = [None] * self.world.size
        dist.gather_object(self._report(folder, mode), reports, dst=0, group=self.group)
        if errors := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(reports) if error]:
            raise OSError("; ".join(errors))
        for rank, (entry, _) in enumerate(reports):
            path = folder / file_name(rank, self.world.size)
            if not path.is_file() or path.stat().st_size != entry["size"]:
                raise OSError(f"the file of rank {rank} is not in {folder} here; all machines must share the folder")
        return {file_name(rank, self.world.size): entry for rank, (entry, _) in enumerate(reports)}

    def give_up(self) -> None:
        """Let the other ranks go on if they have not been told a folder."""
        if not self._told:
            with suppress(RuntimeError):  # they have gone
                self._tell(None)

    def follow(self) -> None:
        """Write this rank's file when rank 0 tells the folder, and report to it."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[0] is not None:
            dist.gather_object(self._report(Path(box[0][0]), box[0][1]), None, dst=0, group=self.group)

    def _tell(self, what: tuple[str, int] | None) -> None:
        self._told = True
        dist.broadcast_object_list([what], src=0, group=self.group)

    def _report(self, folder: Path, mode: int) -> tuple[dict[str, Any] | None, str | None]:
        """Write this rank's file; return its entry of the manifest, or what went wrong."""
        path = folder / file_name(self.world.rank, self.world.size)
        try:
            write(path, self.pieces)
            flush(path, mode)
            return manifest_entry(path), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"


class RankFiles:
    """The files of this rank, one for each checkpoint. Every rank makes one of these."""

    def __init__(self, world: World):
        self.world, self.group = world, dist.new_group(backend="gloo", timeout=SLOWEST)
        self._thread: threading.Thread | None = None

    def of(self, pieces: Pieces) -> RankFile:
        """Return what rank 0 gives to `Checkpoints.save`."""
        return RankFile(self.world, self.group, pieces)

    def follow(self, pieces: Pieces) -> None:
        """Copy off the device now and write in the background, together with rank 0. For all other ranks."""
        self.wait()
        file = self.of(pieces)
        file.copy()
        self._thread = threading.Thread(target=self._follow, args=(file,), name="checkpoint")
        self._thread.start()

    def _follow(self, file: RankFile) -> None:
        try:
            file.follow()
        except RuntimeError:  # rank 0 has gone, and no checkpoint becomes of this
            return

    def wait(self) -> None:
        """Wait for the write in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
