"""Checkpoints that are whole or not there: written beside, flushed, renamed; verified before anything is used.

    checkpoints/step-00001000/      <stem>.safetensors for each group of tensors, state.json, manifest.json
                                    (of a sharded run one file of each rank instead, see pieces.py)
    checkpoints/best, last          links for users; loading depends on neither

The manifest is written last and holds the size and SHA-256 of every file, and of itself. Rank 0 writes with
`Checkpoints`; the functions are for reading, on any rank. Nothing but tensors is ever unpickled.
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from .files import flush, make_folder, manifest_entry, replacing, sync_folder
from .pieces import IS_PIECES, Pieces, Tensors, host_copies, join, read
from .weights import check_shapes

State = dict[str, Any]  # whatever JSON can hold

FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.step-(\d{8,})\.old")
_UNFINISHED = re.compile(r"\.(?:step-\d{8,}|best|last)\.(\d{1,9})\.(?:tmp|gone)")


class Damaged(ValueError):
    """The files of a checkpoint are not those that were written."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    tensors: Tensors
    state: State
    final: bool = False


class Shards(Protocol):
    """The files of a checkpoint that each rank writes itself."""

    def copy(self) -> None:
        """Copy this rank's tensors off the device."""

    def write(self, folder: Path, mode: int) -> dict[str, Any]:
        """Have every rank write its file, and return their entries of the manifest; raise if one rank fails."""

    def give_up(self) -> None:
        """Let the other ranks go on if they wait for `write`, which does not come."""


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path, keep: int = 3):
        if keep < 1:
            raise ValueError(f"at least one checkpoint must be kept, not {keep}; 3 is the default")
        self.folder = folder
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self.written: int | None = None
        """The step that was saved last."""
        self._recover()

    def save(
        self,
        step: int,
        tensors: Tensors,
        state: State,
        best: bool = False,
        final: bool = False,
        shards: Shards | None = None,
    ) -> float:
        """Copy off the device now and write in the background; return the seconds the caller has waited."""
        start = time.perf_counter()
        self.wait()  # before the copy: two of them may not fit into memory
        text = json.dumps(state, indent=1)  # NaN and Infinity are written, and read back, as these words
        if shards is not None:
            shards.copy()
        arguments = (step, host_copies(tensors), text, best, final, shards)
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"checkpoint-{step}")
        self._thread.start()  # no daemon: the interpreter does not exit in the middle of a write
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait for the write in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def failure(self) -> str | None:
        """Return what went wrong in the background since the last call, or None."""
        message, self._failure = self._failure, None
        return message

    def _write(self, step: int, tensors: Tensors, state: str, best: bool, final: bool, shards: Shards | None) -> None:
        name, self.written = f"step-{step:08d}", None
        beside = self.folder / f".{name}.{os.getpid()}.tmp"
        try:
            best = best or name in self._bests()  # the best one, saved again, is still the best
            make_folder(self.folder)
            _fill(beside, tensors, state, {"format": FORMAT, "step": step, "best": best, "final": final}, shards)
            _swap(beside, self.folder / name)
            self.written = step
            self._link("last", name)
            if best:
                self._link("best", name)
            self._delete_old(name)
            self._delete_unfinished({str(os.getpid())})  # where the folder was read-only for a while
        except Exception as error:
            what = "saving" if self.written is None else "deleting old checkpoints after"
            reason = f"{what} step {step} in {self.folder} failed ({type(error).__name__}: {error})"
            self._failure = f"{reason}; training goes on, the next save tries again"
        finally:
            if shards is not None:
                shards.give_up()
            shutil.rmtree(beside, ignore_errors=True)  # there is none where all went well

    def _link(self, name: str, target: str) -> None:
        """Point a link at a checkpoint; a file system without links has none."""
        with suppress(OSError):
            beside = self.folder / f".{name}.{os.getpid()}.tmp"
            beside.unlink(missing_ok=True)
            beside.symlink_to(target)
            beside.replace(self.folder / name)

    def _bests(self) -> set[str]:
        """Return what `best` points at and the newest that was saved as best: a crash in between makes them differ."""
        names = set()
        with suppress(OSError):
            names.add((self.folder / "best").readlink().name)
        for path in _stored(self.folder):
            with suppress(Damaged):
                if _read_manifest(path).get("best"):
                    return names | {path.name}
        return names

    def _delete_old(self, written: str) -> None:
        """Delete all but the newest `keep`, the best and the one just written. Called after a good write only."""
        names = [path.name for path in _stored(self.folder) if _STEP.fullmatch(path.name)]
        kept = {written, *names[: self.keep], *self._bests()}
        for name in set(names) - kept:
            gone = self.folder / f".{name}.{os.getpid()}.gone"
            (self.folder / name).rename(gone)  # in one step: half-deleted, it would look damaged
            shutil.rmtree(gone)

    def _delete_unfinished(self, writers: set[str]) -> None:
        """Delete what these processes have not finished to write or to delete, and do not write any more."""
        for path in self.folder.iterdir() if writers else []:
            with suppress(OSError):
                if (unfinished := _UNFINISHED.fullmatch(path.name)) and unfinished[1] in writers:
                    path.unlink() if path.is_symlink() else shutil.rmtree(path)

    def _recover(self) -> None:
        """Clean up after a process that was killed in the middle of a write."""
        others = {path.name for path in Path("/proc").glob("[0-9]*")} - {str(os.getpid())}  # a restart may reuse ours
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        for path in paths:
            with suppress(OSError):  # loading ignores all of it, so a read-only folder does no harm
                if replaced := _REPLACED.fullmatch(path.name):
                    target = self.folder / f"step-{replaced[1]}"
                    shutil.rmtree(path) if target.exists() else path.rename(target)
        writers = {unfinished[1] for path in paths if (unfinished := _UNFINISHED.fullmatch(path.name))}
        self._delete_unfinished(writers - others)
        if bests := [name for name in self._bests() if (self.folder / name).is_dir()]:
            self._link("best", max(bests))


def _fill(folder: Path, tensors: Tensors, state: str, manifest: dict[str, Any], shards: Shards | None) -> None:
    """Write and flush the files of a checkpoint, and last the manifest with their hashes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for stem, group in tensors.items():
        safetensors.torch.save_file(group, folder / f"{stem}.safetensors")
    (folder / "state.json").write_text(state)
    mode = (folder / "state.json").stat().st_mode  # as the umask asks for
    files = {}
    for path in sorted(folder.iterdir()):
        flush(path, mode)
        files[path.name] = manifest_entry(path)
    if shards is not None:
        files.update(shards.write(folder, mode))
    (folder / "manifest.json").write_bytes(_sealed({**manifest, "files": files}))
    flush(folder / "manifest.json")
    sync_folder(folder)


def _swap(beside: Path, target: Path) -> None:
    """Rename `beside` to `target`; a crash at any moment leaves the old or the new one, under a name that is found."""
    aside = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    beside.rename(target)
    sync_folder(target.parent)
    sync_folder(target.parent.parent)  # the folder itself may be new
    shutil.rmtree(aside, ignore_errors=True)


def _sealed(content: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, with the SHA-256 of its content; equal contents have equal bytes."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True).encode()


def _step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint, also of one that is being replaced; None for any other name."""
    found = _STEP.fullmatch(path.name) or _REPLACED.fullmatch(path.name)
    return int(found[1]) if found else None


def _stored(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first; one being replaced counts if the new one is missing."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []  # hidden ones first, so that the others win
    found = {step: path for path in paths if (step := _step_of(path)) is not None and path.is_dir()}
    return [found[step] for step in sorted(found, reverse=True)]


def load(path: Path) -> Checkpoint:
    """Return one checkpoint. Every file is read once, verified, and only then parsed."""
    manifest = _read_manifest(path)
    if manifest.get("format") != FORMAT:
        raise Damaged(f"{path} has format {manifest.get('format')} in manifest.json, this Lockstep reads {FORMAT}")
    if _step_of(path.resolve()) not in (None, manifest["step"]):
        raise Damaged(f"{path} is damaged: manifest.json is that of step {manifest['step']}")
    tensors: Tensors = {}
    state: State = {}
    pieces: list[Pieces] = []
    for name, entry in manifest["files"].items():
        data = _read(path, name)
        if len(data) != entry["size"]:
            raise Damaged(f"{path} is damaged: {name} has {len(data)} bytes, should have {entry['size']}")
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise Damaged(f"{path} is damaged: {name} has other contents than were written (SHA-256 differs)")
        try:
            if name == "state.json":
                state = json.loads(data)
            elif IS_PIECES.fullmatch(name):
                pieces.append(read(data))
            else:
                tensors[name.removesuffix(".safetensors")] = safetensors.torch.load(data)
        except (ValueError, safetensors.SafetensorError) as error:
            raise Damaged(f"{path} is damaged: {name} cannot be parsed ({error})") from None
    try:
        tensors |= join(pieces)
    except ValueError as error:
        raise Damaged(f"{path} is damaged: the files of its ranks do not fit together ({error})") from None
    return Checkpoint(path, manifest["step"], tensors, state, manifest["final"])


def _read(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        how = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise Damaged(f"{path} is damaged: {name} {how}") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    data = _read(path, "manifest.json")
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        manifest = json.loads(data)
        del manifest["sha256"]
        if _sealed(manifest) == data and manifest.keys() >= {"step", "final", "files"}:
            return manifest
    raise Damaged(f"{path} is damaged: manifest.json has other contents than were written")


def newest(folder: Path, report: Callable[[str], None], up_to: float = math.inf) -> Checkpoint | None:
    """Return the newest checkpoint (up to a step) that is intact, or None; each damaged one is reported by name."""
    tried: set[Path] = set()
    while untried := [
        path for path in _stored(folder) if path not in tried and (_step_of(path) or 0) <= up_to
    ]:  # listed again: a running run may delete some
        path = untried[0]
        tried.add(path)
        try:
            return load(path)
        except Damaged as damage:
            if path.is_dir():
                report(f"{damage}; " + ("using the one before it" if untried[1:] else "there is none before it"))
    return None


def states(folder: Path) -> dict[int, State]:
    """Return, by step, the numbers of each checkpoint of a folder that can be read; nothing is verified."""
    found: dict[int, State] = {}
    for path in _stored(folder):
        with suppress(OSError, ValueError):
            found[_step_of(path) or 0] = json.loads((path / "state.json").read_text())
    return found


def resolve(path: Path) -> Path:
    """Return the checkpoint, or the folder of checkpoints, of a path to a run, its `checkpoints` or one checkpoint."""
    if is_checkpoint(path):
        return path
    for folder in (path / "checkpoints", path):
        if _stored(folder):
            return folder
    wrong = "is a file" if path.is_file() else "holds no checkpoint" if path.exists() else "does not exist"
    raise ValueError(f"{path} {wrong}; give a run folder (one with checkpoints/step-...), or one of its checkpoints")


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is one checkpoint, intact or damaged, rather than a folder of them."""
    return path.is_dir() and ((path / "manifest.json").exists() or _step_of(path.resolve()) is not None)


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy loaded tensors into a plain model that has exactly these."""
    check_shapes(model.state_dict(), tensors, source)
    model.load_state_dict(tensors)


def export(path_stem: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write `<stem>.safetensors` and `<stem>.pth` for other programs; each appears whole or not at all."""
    copies = host_copies({"": dict(tensors)})[""]
    for ending in (".safetensors", ".pth"):
        path = path_stem.with_name(path_stem.name + ending)  # with_suffix would cut "ema-0.9999" at the dot
        with replacing(path) as temporary:
            if ending == ".pth":
                torch.save(copies, temporary)
            else:
                safetensors.torch.save_file(copies, temporary, metadata)
