"""A checkpoint is whole or not there, and what is loaded is what was saved."""

import errno
import json
import math
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint import Checkpoints, Damaged, load, newest
from lockstep.optim import OptimizerState
from lockstep.weights import read_weights

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def silent(message: str) -> None:
    raise AssertionError(f"nothing should be reported, but: {message}")


def content(step: int) -> checkpoint.Tensors:
    """Tensors that tell their step."""
    return {
        "model": {"weight": torch.full((5, 7), float(step)), "count": torch.tensor(step)},
        "optimizer": {"weight/exp_avg": torch.arange(35.0) + step},
    }


def write(folder: Path, *steps: int, keep: int = 3) -> None:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, content(step), {"step": step})
    checkpoints.wait()
    assert checkpoints.failure() is None


def check(found: checkpoint.Checkpoint | None, step: int) -> None:
    assert found is not None and found.step == step and found.state == {"step": step}
    same(found.tensors, content(step))


def same(a: checkpoint.Tensors, b: checkpoint.Tensors) -> None:
    assert a.keys() == b.keys()
    for stem in a:
        assert a[stem].keys() == b[stem].keys()
        for name in a[stem]:
            x, y = a[stem][name], b[stem][name]
            assert x.dtype == y.dtype and x.shape == y.shape, name
            assert torch.equal(x.reshape(-1).view(torch.uint8), y.cpu().reshape(-1).contiguous().view(torch.uint8)), (
                name
            )


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def everything(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- round trip


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 5)])
def test_every_type_and_shape_comes_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool]
    tensors = {"model": {str(kind): (torch.rand(shape) * 9 - 2).to(kind) for kind in kinds}}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tensors, {})
    checkpoints.wait()
    assert checkpoints.failure() is None
    same(load(tmp_path / "step-00000001").tensors, tensors)


def test_shared_strided_and_expanded_tensors_come_back(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    group = {"whole": whole, "again": whole, "row": whole[2], "transposed": whole.t(), "step": whole[::2, 1:3]}
    group |= {
        "expanded": torch.ones(1).expand(3, 3),
        "parameter": nn.Parameter(whole),
        "odd/näme.0": whole.new_zeros(2),
    }
    group |= {"conj": torch.randn(3, dtype=torch.complex64).conj()}
    group |= {"channels": torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"model": group, "ema-0.9999": group, "empty": {}}, {})
    checkpoints.wait()
    assert checkpoints.failure() is None
    found = load(tmp_path / "step-00000001").tensors
    assert found.keys() == {"model", "ema-0.9999", "empty"} and found["empty"] == {}
    for name, tensor in group.items():
        assert torch.equal(found["model"][name], tensor), name


def test_state_comes_back_with_nan_and_infinity(tmp_path: Path) -> None:
    state = {
        "best": math.inf,
        "worst": -math.inf,
        "loss": math.nan,
        "seed": 2**63 + 1,
        "text": "ä\n",
        "deep": [{"a": None}, 0.1],
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {}, state, final=True)
    checkpoints.wait()
    found = load(tmp_path / "step-00000001")
    assert math.isnan(found.state.pop("loss")) and math.isnan(state.pop("loss"))  # type: ignore[arg-type]
    assert found.state == state and found.final


def test_state_that_is_not_json_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Checkpoints(tmp_path).save(1, {}, {"tensor": torch.zeros(1)})
    assert steps(tmp_path) == []


@cuda
def test_a_gpu_tensor_comes_back_as_it_was_when_saved(tmp_path: Path) -> None:
    tensor = torch.randn(4096, 4096, device="cuda")
    group = {"a": tensor, "t": tensor.t(), "half": tensor.bfloat16()[:7], "scalar": tensor[0, 0], "none": tensor[:0]}
    half = group["half"].cpu()
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        expected = tensor.cpu()
        checkpoints.save(step, {"model": group}, {})
        tensor.add_(1)
        checkpoints.wait()
        assert checkpoints.failure() is None
        found = load(tmp_path / f"step-{step:08d}").tensors["model"]
        assert torch.equal(found["a"], expected) and torch.equal(found["t"], expected.t())
        assert torch.equal(found["scalar"], expected[0, 0]) and torch.equal(found["half"], half)


# ---- in the background


class Gate:
    """Holds the writer until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open, self.entered = threading.Event(), threading.Event()
        self.inside = self.most = 0
        fill = checkpoint._fill

        def gated(*arguments: Any) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.entered.set()
            assert threading.current_thread() is not threading.main_thread() and self.open.wait(300)
            fill(*arguments)
            self.inside -= 1

        monkeypatch.setattr(checkpoint, "_fill", gated)


def test_save_returns_before_the_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    begun = time.perf_counter()
    pause = checkpoints.save(1, content(1), {"step": 1})
    assert 0 < pause <= time.perf_counter() - begun
    assert gate.entered.wait(300) and gate.inside == 1  # it is being written
    assert newest(tmp_path / "checkpoints", silent) is None
    gate.open.set()
    checkpoints.wait()
    assert gate.most == 1
    check(newest(tmp_path / "checkpoints", silent), 1)


def test_what_changes_after_save_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    checkpoints, tensors, state = Checkpoints(tmp_path), content(1), {"step": 1}
    checkpoints.save(1, tensors, state)
    for group in tensors.values():
        for tensor in group.values():
            tensor.zero_()
    tensors["model"].clear()
    state["step"] = 2
    gate.open.set()
    checkpoints.wait()
    check(newest(tmp_path, silent), 1)


def test_one_write_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    checkpoints = Checkpoints(tmp_path, keep=20)
    pauses = [checkpoints.save(step, content(step), {"step": step}) for step in range(8)]
    checkpoints.wait()
    assert gate.most == 1 and all(pause > 0 for pause in pauses)
    assert len(steps(tmp_path)) == 8


# ---- retention, links


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 8):
        checkpoints.save(step, content(step), {"step": step}, best=step in (1, 3))
        checkpoints.wait()
        assert checkpoints.failure() is None
    assert steps(tmp_path) == ["step-00000003", "step-00000006", "step-00000007"]
    assert (
        str((tmp_path / "best").readlink()) == "step-00000003"
        and str((tmp_path / "last").readlink()) == "step-00000007"
    )
    write(tmp_path, 8, keep=1)  # another process goes on
    assert steps(tmp_path) == ["step-00000003", "step-00000008"]
    check(load(tmp_path / "best"), 3)
    with pytest.raises(ValueError, match="at least one"):
        Checkpoints(tmp_path, keep=0)


def test_the_best_is_known_without_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refuse)
        checkpoints = Checkpoints(tmp_path, keep=1)
        for step in range(1, 5):
            checkpoints.save(step, content(step), {"step": step}, best=step == 2)
        checkpoints.wait()
        assert checkpoints.failure() is None
    assert everything(tmp_path) == ["step-00000002", "step-00000004"]
    Checkpoints(tmp_path)
    assert str((tmp_path / "best").readlink()) == "step-00000002"


def test_the_best_one_saved_again_is_still_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, content(1), {"step": 1}, best=True)
    checkpoints.save(1, content(1), {"step": 1}, final=True)
    checkpoints.wait()
    (tmp_path / "best").unlink()
    write(tmp_path, 2, 3, keep=1)
    assert steps(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_checkpoint_older_than_the_others_is_not_retired_at_once(tmp_path: Path) -> None:
    write(tmp_path, 10, 20, 30)
    write(tmp_path, 5, keep=2)
    assert steps(tmp_path) == ["step-00000005", "step-00000020", "step-00000030"]


def test_steps_of_more_than_eight_digits_are_ordered_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, 99_999_999, 100_000_000)
    check(newest(tmp_path, silent), 100_000_000)


# ---- crashes

CRASHES = '''
"""Fork a writer, kill it at its k-th operation on files, or at a random moment; look at what it left."""
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from lockstep.checkpoint import Checkpoints, load, newest
from tests.test_checkpoint import check, content, silent, write

base = Path(sys.argv[1])
OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "shutil.rmtree"}

def writer(folder, done, saves):
    checkpoints = Checkpoints(folder, keep=1)
    for step in saves:
        checkpoints.save(step, content(step), {"step": step}, best=step == 2)
        checkpoints.wait()
        os.write(done, b"x")
    os._exit(0)

def forked(folder, saves, die_at=None):
    read, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0
        def hook(event, _):
            nonlocal count
            if event in OPERATIONS:
                count += 1
                if count == die_at:
                    os._exit(9)
        if die_at:
            sys.addaudithook(hook)
        try:
            writer(folder, done, saves)
        finally:
            os._exit(1)
    os.close(done)
    return pid, read

def look(folder, saved, possible):
    """Whatever the moment: a good one is there, not older than the last that was finished."""
    before = newest(folder, silent)
    assert before is not None and before.step >= saved and before.step in possible, (before, saved)
    check(before, before.step)
    for path in folder.glob("step-*"):
        load(path)
    Checkpoints(folder, keep=1)
    hidden = [name for name in os.listdir(folder) if name.startswith(".")]
    assert not hidden, hidden
    check(newest(folder, silent), before.step)

def systematic():
    kills = 0
    while True:
        kills += 1
        folder = base / f"at-{kills}"
        write(folder, 1, keep=1)
        pid, read = forked(folder, (2, 2, 3), kills)
        _, status = os.waitpid(pid, 0)
        finished = len(os.read(read, 100))
        os.close(read)
        look(folder, (1, 2, 2, 3)[finished], (1, 2, 3))
        if finished >= 1:
            check(load(folder / "best"), 2)
        shutil.rmtree(folder)
        if os.WEXITSTATUS(status) == 0:
            return kills - 1
        assert os.WEXITSTATUS(status) == 9, status

def at_random(kills):
    folder = base / "random"
    write(folder, 1, keep=1)
    for _ in range(kills):
        first = newest(folder, silent).step
        pid, read = forked(folder, [step for k in range(first + 1, first + 3000) for step in (k, k)])
        time.sleep(random.uniform(0.0, 0.25))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        finished = len(os.read(read, 10000))
        os.close(read)
        look(folder, first + (finished + 1) // 2, range(first, first + 3000))
    return newest(folder, silent).step

print(systematic(), "kills at every operation;", at_random(15), "steps over 15 random kills")
'''


@pytest.mark.slow
def test_a_killed_writer_leaves_a_good_checkpoint_at_every_moment(tmp_path: Path) -> None:
    memory = Path("/dev/shm")  # a kill, unlike a power cut, does not depend on the disk; flushing there takes no time
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        root = Path(__file__).parent.parent
        command = [sys.executable, "-c", CRASHES, folder, str(root)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[0]) > 50, run.stdout


def test_one_moved_aside_counts_where_its_successor_never_came(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / "step-00000002").rename(tmp_path / ".step-00000002.old")
    check(newest(tmp_path, silent), 2)
    Checkpoints(tmp_path)
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.old")
    Checkpoints(tmp_path)
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    check(newest(tmp_path, silent), 2)


def test_only_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive = tmp_path / f".step-00000009.{os.getppid()}.tmp"
    for path in (tmp_path / f".step-00000009.{dead.pid}.tmp", tmp_path / f".step-00000008.{os.getpid()}.gone", alive):
        shutil.copytree(tmp_path / "step-00000001", path)
    (tmp_path / f".best.{dead.pid}.tmp").symlink_to("nowhere")
    (tmp_path / ".mine").mkdir()
    Checkpoints(tmp_path)
    assert everything(tmp_path) == [".mine", alive.name, "last", "step-00000001"]
    check(newest(tmp_path, silent), 1)


def test_what_a_read_only_folder_kept_is_removed_after_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        checkpoints.save(1, content(1), {})
        checkpoints.wait()
    assert checkpoints.failure() and everything(tmp_path) == [f".step-00000001.{os.getpid()}.tmp"]
    checkpoints.save(2, content(2), {})
    checkpoints.wait()
    assert everything(tmp_path) == ["last", "step-00000002"]


# ---- damage


def damaged(data: bytes, other: bytes, chance: random.Random) -> bytes | None:
    """The bytes of a file after an accident; None: the file is gone."""
    kind = chance.choice(["flip", "truncate", "delete", "zero", "swap", "empty", "append", "noise", "reverse"])
    start = chance.randrange(len(data))
    end = start + chance.randint(1, 64)
    return {
        "flip": data[:start] + bytes([data[start] ^ 1 << chance.randrange(8)]) + data[start + 1 :],
        "truncate": data[:start],
        "delete": None,
        "zero": data[:start] + bytes(len(data[start:end])) + data[end:],
        "swap": other,
        "empty": b"",
        "append": data + chance.randbytes(chance.randint(1, 9)),
        "noise": chance.randbytes(len(data)),
        "reverse": data[::-1],
    }[kind]


def test_a_thousand_damages_are_all_noticed(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    old, new = tmp_path / "step-00000001", tmp_path / "step-00000002"
    files = sorted(path.name for path in new.iterdir())
    assert files == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    good = {name: (new / name).read_bytes() for name in files}
    others = {name: (old / name).read_bytes() for name in files}
    chance, noticed = random.Random(0), 0
    while noticed < 1000:
        name = chance.choice(files)
        bad = damaged(good[name], others[name], chance)
        if bad == good[name]:
            continue
        (new / name).unlink() if bad is None else (new / name).write_bytes(bad)
        with pytest.raises(Damaged, match=f"step-00000002 .*{name}"):
            load(new)
        reports: list[str] = []
        check(newest(tmp_path, reports.append), 1)
        assert len(reports) == 1 and str(new) in reports[0] and name in reports[0] and "before it" in reports[0]
        (new / name).write_bytes(good[name])
        noticed += 1
    check(newest(tmp_path, silent), 2)


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    write(tmp_path, 1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    data, chance = manifest.read_bytes(), random.Random(0)
    for place in range(len(data)):
        bad = bytearray(data)
        bad[place] ^= 1 << chance.randrange(8)
        manifest.write_bytes(bad)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            load(manifest.parent)


def test_other_damages(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    one, two = tmp_path / "step-00000001", tmp_path / "step-00000002"
    (two / "notes.txt").write_text("not ours")
    check(load(two), 2)
    model = (two / "model.safetensors").read_bytes()
    (two / "model.safetensors").write_bytes(model[:10])
    reports: list[str] = []
    check(newest(tmp_path, reports.append), 1)
    assert reports == [
        f"{two} is damaged: model.safetensors has 10 bytes, should have {len(model)}; using the one before it"
    ]
    (two / "model.safetensors").unlink()
    (two / "model.safetensors").mkdir()
    with pytest.raises(Damaged, match="cannot be read"):
        load(two)
    shutil.rmtree(two)
    one.rename(two)  # all files of another step
    with pytest.raises(Damaged, match="step 1"):
        load(two)
    (two / "manifest.json").write_text("[" * 100_000)
    reports.clear()
    assert newest(tmp_path, reports.append) is None
    assert "there is none before it" in reports[0]
    assert newest(tmp_path / "nowhere", silent) is None


@pytest.mark.parametrize("change", [{"format": 2}, {"files": None}, {"step": None}])
def test_another_format_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, 1)
    path = tmp_path / "step-00000001"
    manifest = {k: v for k, v in json.loads((path / "manifest.json").read_text()).items() if k != "sha256"} | change
    (path / "manifest.json").write_bytes(checkpoint._sealed({k: v for k, v in manifest.items() if v is not None}))
    with pytest.raises(Damaged, match=r"manifest\.json"):
        load(path)


def test_a_file_that_was_written_wrong_is_damage_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors.torch, "save_file", lambda _, path: Path(path).write_bytes(b"\xff" * 99))
    write(tmp_path, 1)
    with pytest.raises(Damaged, match=r"model\.safetensors cannot be parsed"):
        load(tmp_path / "step-00000001")


# ---- failing writes


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Let the kernel refuse files of more than so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size if size else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_kernel_cuts_off_costs_nothing(tmp_path: Path, small_files: Callable[[int], None]) -> None:
    write(tmp_path, 1, 2, keep=2)
    before = everything(tmp_path)
    checkpoints = Checkpoints(tmp_path, keep=1)
    small_files(100_000)
    checkpoints.save(3, {"model": {"big": torch.zeros(1 << 20)}}, {})
    checkpoints.wait()
    small_files(0)
    message = checkpoints.failure()
    assert message is not None and "step 3" in message and str(tmp_path) in message and "File too large" in message
    assert checkpoints.failure() is None
    assert everything(tmp_path) == before
    checkpoints.save(4, content(4), {"step": 4})
    checkpoints.wait()
    assert checkpoints.failure() is None and steps(tmp_path) == ["step-00000004"]


def test_a_full_disk_costs_no_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, 2, keep=2)

    def full(_: dict[str, Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = Checkpoints(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        for step in (2, 3):  # one that is there already, and a new one
            checkpoints.save(step, content(step), {"step": step})
            checkpoints.wait()
            assert "No space left" in (checkpoints.failure() or "")
            assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    check(newest(tmp_path, silent), 2)


def test_a_folder_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        checkpoints = Checkpoints(folder)
        checkpoints.save(1, content(1), {"step": 1})
        checkpoints.wait()
        assert "step 1" in (checkpoints.failure() or "")


def test_a_deleted_folder_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run" / "checkpoints"
    write(folder, 1)
    gate = Gate(monkeypatch)
    gate.open.set()
    checkpoints = Checkpoints(folder)
    fill = checkpoint._fill

    def delete(*arguments: Any) -> None:
        fill(*arguments)
        shutil.rmtree(tmp_path / "run")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_fill", delete)  # in the middle of a write
        checkpoints.save(2, content(2), {"step": 2})
        checkpoints.wait()
    assert "step 2" in (checkpoints.failure() or "") and not folder.exists()
    checkpoints.save(3, content(3), {"step": 3})
    checkpoints.wait()
    assert checkpoints.failure() is None
    check(newest(folder, silent), 3)


def test_a_failing_removal_is_reported_and_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    write(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    checkpoints.save(2, content(2), {"step": 2})
    checkpoints.wait()
    assert "Permission denied" in (checkpoints.failure() or "")
    check(newest(tmp_path, silent), 2)


# ---- what a user gives


def test_a_run_its_checkpoints_and_one_checkpoint_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    write(folder, 1, 2)
    (tmp_path / "run" / "model.pth").write_text("")
    assert checkpoint.resolve(tmp_path / "run") == folder == checkpoint.resolve(folder)
    assert not checkpoint.is_checkpoint(folder)
    for path in (folder / "step-00000001", folder / "last"):
        assert checkpoint.resolve(path) == path and checkpoint.is_checkpoint(path)
    (folder / "step-00000001" / "manifest.json").unlink()
    assert checkpoint.resolve(folder / "step-00000001") == folder / "step-00000001"
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    wrong = {"no": "does not exist", "empty": "holds no checkpoint", "run/model.pth": "is a file"}
    for name, why in wrong.items():
        with pytest.raises(ValueError, match=why):
            checkpoint.resolve(tmp_path / name)


def test_another_model_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    checkpoint.restore_model(model, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "x")
    assert torch.equal(model.weight, torch.ones(2, 3))
    other = {"weight": torch.ones(3, 3)} | {f"blocks.{i}.weight": torch.ones(i) for i in range(5)}
    with pytest.raises(ValueError) as refusal:
        checkpoint.restore_model(model, other, "step-00000001/model")
    assert str(refusal.value) == (
        "step-00000001/model is of another model: 1 missing (bias (2,)), "
        "5 unexpected (blocks.0.weight (0,); blocks.1.weight (1,); blocks.2.weight (2,); ...), "
        "1 of another shape (weight (3, 3), here (2, 3)). Use the settings that it was trained with."
    )


# ---- weights for others


def test_exported_weights_load_in_both_forms(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].bias = nn.Parameter(model[0].weight.data[0])  # a view
    tensors = model.state_dict()
    checkpoint.export(tmp_path / "ema-0.9999", tensors, {"recipe": "dit"})
    assert everything(tmp_path) == ["ema-0.9999.pth", "ema-0.9999.safetensors"]
    for ending in (".pth", ".safetensors"):
        found = read_weights(tmp_path / f"ema-0.9999{ending}")
        same({"": found}, {"": tensors})
    plain = torch.load(tmp_path / "ema-0.9999.pth", weights_only=True)
    assert type(plain) is dict and {type(value) for value in plain.values()} == {Tensor}
    nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).load_state_dict(plain)
    with safetensors.safe_open(tmp_path / "ema-0.9999.safetensors", "pt") as file:
        assert file.metadata() == {"recipe": "dit"}


class Malicious:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_malicious_file_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"weight": Malicious(marker)}, tmp_path / "zip.pth")
    torch.save({"weight": Malicious(marker)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pth").write_bytes(pickle.dumps(Malicious(marker)))
    for name in ("zip.pth", "old.pt", "bare.pth"):
        with pytest.raises(ValueError, match=name):
            read_weights(tmp_path / name)
    assert not marker.exists()
    torch.load(tmp_path / "zip.pth", weights_only=False)
    assert marker.exists(), "the trap itself must work"


def test_what_is_not_weights_is_refused(tmp_path: Path) -> None:
    checkpoint.export(tmp_path / "good", {"a": torch.zeros(99)}, {})
    chance = random.Random(0)
    for ending in (".pth", ".safetensors"):
        data = (tmp_path / f"good{ending}").read_bytes()
        bad = tmp_path / f"bad{ending}"
        huge = (2**62).to_bytes(8, "little") + b"{}"
        header = b'{"a":{"dtype":"F32","shape":[9999999999],"data_offsets":[0,4]}}'
        for garbage in (b"", b"\0" * 99, data[:-1], data[: len(data) // 2], huge, chance.randbytes(500), b"x",
                        len(header).to_bytes(8, "little") + header + b"1234"):  # fmt: skip
            bad.write_bytes(garbage)
            with pytest.raises(ValueError, match=f"bad{ending}"):
                read_weights(bad)
    for thing in ([torch.zeros(1)], {"optimizer": {"a": torch.zeros(1)}}, {"a": 1}, torch.zeros(1)):
        torch.save(thing, tmp_path / "thing.pt")
        with pytest.raises(ValueError, match="holds no dict of tensors"):
            read_weights(tmp_path / "thing.pt")
    for name, why in (("good.bin", "are read from"), ("missing.pth", "no file"), ("good", "are read from")):
        with pytest.raises(ValueError, match=why):
            read_weights(tmp_path / name)


def test_an_export_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.export(tmp_path / "model", {"a": torch.zeros(3)}, {})

    def full(_: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.export(tmp_path / "model", {"a": torch.ones(3)}, {})
    assert everything(tmp_path) == ["model.pth", "model.safetensors"]
    assert torch.equal(read_weights(tmp_path / "model.pth")["a"], torch.zeros(3))


# ---- the optimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=False),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "sgd fused": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}


def build(kind: str, device: str, other_order: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 5))
    model = model.to(device, memory_format=torch.channels_last)
    model[4].weight.requires_grad_(False)  # never has any state
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    if other_order:
        groups = [{**group, "params": group["params"][::-1]} for group in reversed(groups)]
    return model, OPTIMIZERS[kind](groups)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    device = next(model.parameters()).device
    for step in steps:
        x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def continued(tmp_path: Path, kind: str, device: str, before: int) -> None:
    model, optimizer = build(kind, device)
    train(model, optimizer, range(before))
    state = OptimizerState(optimizer, dict(model.named_parameters()))
    tensors = {"model": model.state_dict(), "optimizer": state.state_dict()}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(before, tensors, {})
    train(model, optimizer, range(before, before + 4))
    checkpoints.wait()
    assert checkpoints.failure() is None

    found = load(tmp_path / f"step-{before:08d}").tensors
    again, its = build(kind, device, other_order=True)
    train(again, its, range(50, 52))  # state of its own, to be forgotten
    checkpoint.restore_model(again, found["model"], "model")
    its_state = OptimizerState(its, dict(again.named_parameters()))
    its_state.load_state_dict(found["optimizer"])
    train(again, its, range(before, before + 4))
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    after, others = state.state_dict(), its_state.state_dict()
    same({"": {k: v.cpu() for k, v in after.items()}}, {"": others})
    for name in after:
        assert after[name].device == others[name].device and after[name].stride() == others[name].stride(), name


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: str, before: int) -> None:
    continued(tmp_path, kind, "cpu", before)


@cuda
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "nadam"])
def test_training_on_a_gpu_goes_on_bit_for_bit(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    continued(tmp_path, kind, "cuda", 3)


def test_state_names_tell_the_parameter() -> None:
    model, optimizer = build("adamw", "cpu")
    train(model, optimizer, range(1))
    names = dict(model.named_parameters())
    tensors = OptimizerState(optimizer, names).state_dict()
    assert {"0.weight/exp_avg", "0.weight/exp_avg_sq", "0.weight/step"} <= tensors.keys()
    with pytest.raises(ValueError, match=r"'3\.bias' is trained"):
        other = OptimizerState(torch.optim.AdamW([model[0].weight]), names)
        other.load_state_dict({"3.bias/step": tensors["3.bias/step"]})


def test_a_plain_run_goes_on_fused_and_back() -> None:
    model, optimizer = build("adamw", "cpu")
    train(model, optimizer, range(2))
    names = dict(model.named_parameters())
    for kind in ("adamw fused", "adamw foreach", "adamw fused", "adamw"):
        tensors = OptimizerState(optimizer, names).state_dict()
        optimizer = OPTIMIZERS[kind](list(reversed(list(model.parameters()))))
        OptimizerState(optimizer, names).load_state_dict(tensors)
        train(model, optimizer, range(1))
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}


def test_state_keeps_its_own_type() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter])
    state = {"master": torch.rand(3), "mask": torch.tensor([True]), "none": None, "n": 7, "f": 0.1, "flag": True}
    optimizer.state[parameter] = dict(state)
    tensors = OptimizerState(optimizer, {"p": parameter}).state_dict()
    assert all(isinstance(value, Tensor) for value in tensors.values()) and len(tensors) == 5
    fresh = torch.optim.SGD([parameter])
    OptimizerState(fresh, {"p": parameter}).load_state_dict(tensors)
    found = fresh.state[parameter]
    assert torch.equal(found.pop("master"), state.pop("master")) and torch.equal(found.pop("mask"), state.pop("mask"))
    assert found == {"n": 7, "f": 0.1, "flag": True} and [type(value) for value in found.values()] == [int, float, bool]


def test_state_that_is_no_tensor_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.LBFGS([parameter])
    optimizer.state[parameter] = {"old_dirs": [torch.zeros(3)]}
    with pytest.raises(ValueError, match="LBFGS keeps p/old_dirs as a list"):
        OptimizerState(optimizer, {"p": parameter}).state_dict()
