"""The command as a user meets it: statuses, verdicts of hangs and crashes, rubbish."""

import json
import signal
import subprocess
import textwrap
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from processes import environment

from lockstep.audit import command
from lockstep.script import split_words

TRAIN = """
    import os, torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.arange(64.0).view(32, 2)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    model = DDP(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in DataLoader(data, 4, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
"""


def audit(folder: Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(textwrap.dedent(script))
    words = ["lockstep", "audit", "--json", "audit.json", *flags, "--", "train.py"]
    return subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )


def names(folder: Path) -> list[str]:
    return [f["name"] for f in json.loads((folder / "audit.json").read_text())["findings"]]


def line_of(folder: Path, text: str) -> int:
    lines = (folder / "train.py").read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if text in line)


@pytest.mark.slow
def test_a_sound_script_has_status_0_and_is_stopped_after_its_steps(tmp_path: Path) -> None:
    done = audit(tmp_path, TRAIN, "--steps", "5", "--html", "audit.html")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing found" in done.stdout and "5 steps" in done.stdout
    assert (tmp_path / "audit.html").read_text().startswith("<!DOCTYPE html>")


def test_a_script_with_an_error_has_status_1_and_is_told_where_and_why(tmp_path: Path) -> None:
    done = audit(tmp_path, TRAIN.replace("model(a)", "model.module(a)"))
    assert done.returncode == 1 and names(tmp_path) == ["unsynchronised"]
    (found,) = json.loads((tmp_path / "audit.json").read_text())["findings"]
    assert found["line"] == line_of(tmp_path, "model.module(a)") and found["why"] and found["fix"]
    assert "train.py" in done.stdout and ".module" in done.stdout


@pytest.mark.slow
def test_a_backward_pass_by_its_function_counts_once(tmp_path: Path) -> None:
    """Under a mode torch's function hands itself to the mode, which calls it again."""
    words = "nn.functional.mse_loss(model(a), b).backward()"
    assert words in TRAIN
    audit(
        tmp_path, TRAIN.replace(words, "torch.autograd.backward(nn.functional.mse_loss(model(a), b))"), "--steps", "3"
    )
    assert names(tmp_path) == []
    uneven = TRAIN.replace(words, "torch.autograd.backward(nn.functional.mse_loss(model.module(a), b))")
    done = audit(tmp_path, uneven + "        if rank == 0:\n            break\n", "--steps", "0", "--patience", "4")
    assert "rank 0: 4 backward, 4 steps, rank 1: 12 backward, 12 steps" in done.stdout


@pytest.mark.slow
def test_a_hang_is_ended_and_named_with_rank_call_and_line(tmp_path: Path) -> None:
    script = TRAIN + "        if rank == 1 and epoch == 1:\n            dist.barrier()\n"
    done = audit(tmp_path, script, "--steps", "0", "--patience", "3")
    assert done.returncode == 1 and names(tmp_path) == ["collective-mismatch"]
    (found,) = json.loads((tmp_path / "audit.json").read_text())["findings"]
    assert found["line"] == line_of(tmp_path, "dist.barrier()") and "rank 1 only" in found["what"]
    assert "waits in backward" in " ".join(found["evidence"])
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not psutil.wait_procs(left, timeout=60)[1]  # those that are just ending aside


@pytest.mark.slow
def test_a_hang_without_a_collective_of_torch_is_found_by_its_stack(tmp_path: Path) -> None:
    wait = "import socket\ns = socket.socketpair()\ns[0].recv(1)\n"
    done = audit(tmp_path, wait, "--steps", "0", "--patience", "3")
    assert done.returncode == 1 and names(tmp_path) == ["hangs"]
    (found,) = json.loads((tmp_path / "audit.json").read_text())["findings"]
    assert found["line"] == 3


@pytest.mark.slow
def test_a_crash_is_reported_with_its_line_and_what_was_printed(tmp_path: Path) -> None:
    fail = """
        if epoch == 1:
            import builtins
            builtins.print = lambda *args, **kwargs: None
            raise RuntimeError('no more data')
"""
    done = audit(tmp_path, TRAIN + fail, "--steps", "0")
    assert done.returncode == 1 and names(tmp_path) == ["crashed"]
    assert "no more data" in done.stdout and f"train.py:{line_of(tmp_path, 'no more data')}" in done.stdout
    assert '", line' in done.stdout  # the traceback, though the script prints nothing any more


@pytest.mark.slow
@pytest.mark.parametrize(
    "fail",
    [
        "raise SystemExit('give --data')",
        "nn.functional.mse_loss(model(a), b).detach().backward()",
        "os.kill(os.getpid(), 9)",
        "raise ConnectionResetError('Connection reset by peer')",
    ],
)
def test_of_two_ranks_the_one_that_failed_by_itself_is_named(tmp_path: Path, fail: str) -> None:
    """The other waits for it, or loses its connection, in a call that is watched or in one that is not."""
    script = TRAIN.replace("model = DDP(nn.Linear(2, 1))", "torch.manual_seed(0)\n    model = nn.Linear(2, 1)").replace(
        "            optimizer.step()\n",
        f"            if epoch == 1 and rank == 1:\n                {fail}\n"
        "            for work in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:\n"
        "                work.wait()\n            optimizer.step()\n",
    )
    done = audit(tmp_path, script, "--steps", "0", "--patience", "5")
    assert names(tmp_path)[0] == "crashed" and not {"uneven-steps", "hangs"} & set(names(tmp_path)), done.stdout
    (found,) = [f for f in json.loads((tmp_path / "audit.json").read_text())["findings"] if f["name"] == "crashed"]
    assert found["what"].startswith("rank 1 ")
    assert "SystemExit" not in fail or "give --data" in found["what"]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["init_method='tcp://127.0.0.1:1', world_size=4, rank=rank", ""])
def test_a_script_for_more_ranks_is_refused_at_once(tmp_path: Path, start: str) -> None:
    script = f"""
        import os, torch.distributed as dist, torch.multiprocessing as mp
        def main(rank):
            os.environ.update(RANK=str(rank), WORLD_SIZE="4")
            dist.init_process_group("gloo"{", " * bool(start)}{start})
        if __name__ == "__main__":
            mp.spawn(main, nprocs=4)
    """
    done = audit(tmp_path, script, "--patience", "60")
    assert done.returncode == 2 and "train.py makes a group of 4 ranks" in done.stderr, done.stdout + done.stderr
    assert "--nproc 4" in done.stderr


@pytest.mark.slow
def test_a_module_that_declares_the_old_flag_is_given_it(tmp_path: Path) -> None:
    script = TRAIN.replace(
        'dist.init_process_group("gloo")',
        "import argparse\n    p = argparse.ArgumentParser()\n"
        "    p.add_argument('--local_rank', type=int, required=True)\n"
        "    torch.cuda.set_device(p.parse_args().local_rank)\n    dist.init_process_group('gloo')",
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/train.py").write_text(textwrap.dedent(script))
    words = ["lockstep", "audit", "--json", "audit.json", "--device", "cpu", "--", "-m", "package.train"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and names(tmp_path) == [], done.stdout


@pytest.mark.slow
def test_a_killed_rank_is_a_crash(tmp_path: Path) -> None:
    done = audit(
        tmp_path, TRAIN + "        if epoch == 1 and rank == 1:\n            os.kill(os.getpid(), 9)\n", "--steps", "0"
    )
    assert done.returncode == 1 and "crashed" in names(tmp_path), done.stdout
    assert "rank 1 was ended by signal 9 (Killed)" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("NCCL error: remote process exited or there was a network error\\nncclRemoteError: A call", "uneven-steps"),
        ("CUDA error: device-side assert triggered", "crashed"),
    ],
)
def test_a_rank_ended_by_nccls_watchdog_is_judged_by_its_last_words(tmp_path: Path, last: str, found: str) -> None:
    """As the watchdog does it: it says why, in a thread of its own, and aborts the process."""
    leave = f"""
        if epoch == 1 and rank == 1:
            break
        if epoch == 1:
            model.module(a).sum().backward()
            os.write(2, b"Process group watchdog thread terminated with exception: {last}\\nframe #0: abc\\n")
            os.abort()
"""
    done = audit(tmp_path, TRAIN + leave, "--steps", "0", "--patience", "5")
    assert found in names(tmp_path) and {"uneven-steps", "crashed"} - {found} - set(names(tmp_path)), done.stdout
    assert "was ended by signal 6 (Aborted) at" in done.stdout and "frame #0" not in done.stdout


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_who_ends_the_audit_ends_its_ranks(tmp_path: Path, number: int, status: int) -> None:
    (tmp_path / "train.py").write_text("import time, os\nopen(f'{os.getpid()}.pid', 'w')\ntime.sleep(600)\n")
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which is ignored if the tests run in the background
    words = ["lockstep", "audit", "--", "train.py"]
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(real=True), preexec_fn=hear)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    pids = [int(p.stem) for p in tmp_path.glob("*.pid")]
    process.send_signal(number)
    assert process.wait(300) == status and len(pids) == 2
    while any(alive(pid) for pid in pids):  # for a moment; the test's time is limited
        threading.Event().wait(0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to audit"),
        (["--", "absent.py"], "no script 'absent.py'"),
        (["--", "-m"], "-m needs the name of a module"),
        pytest.param(
            ["--device", "cuda", "--", "train.py"],
            "no GPU is visible",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_the_user_got_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(ValueError, match=message):
        command.audit(words)


def test_a_number_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="nproc is at least 1, not 0"):
        command.Audit(nproc=0)


@pytest.mark.slow
def test_a_module_with_flags_and_a_script_of_one_rank(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:]); assert sys.argv[1:] == ['--lr', '1']\n")
    words = ["lockstep", "audit", "--nproc", "1", "--json", "a.json", "--", "-m", "mine", "--lr", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert [f["name"] for f in json.loads((tmp_path / "a.json").read_text())["findings"]] == ["no-steps"], done.stdout


@pytest.mark.slow
def test_processes_beside_the_ranks_are_said_to_be_unwatched(tmp_path: Path) -> None:
    script = """
        from multiprocessing import Process

        def train(rank):
            pass

        if __name__ == "__main__":
            ranks = [Process(target=train, args=(rank,)) for rank in range(2)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
    """
    done = audit(tmp_path, script)
    assert done.returncode == 0 and "no step was watched" in done.stdout, done.stdout
    assert f"processes of its own (train.py:{line_of(tmp_path, 'rank.start()')})" in done.stdout


@pytest.mark.slow
def test_an_installed_module_is_the_users_too(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "bought"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(textwrap.dedent(TRAIN.replace("model(a)", "model.module(a)")))
    words = ["lockstep", "audit", "--json", "a.json", "--", "-m", "bought.train"]
    there = environment() | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(words, cwd=tmp_path, env=there, capture_output=True, text=True, check=False)
    (found,) = json.loads((tmp_path / "a.json").read_text())["findings"]
    assert found["name"] == "unsynchronised" and found["file"] == str(package / "train.py"), done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--steps", "5", "--html=a.html", "--", "train.py", "--epochs", "1"],
        ["--steps", "5", "--html=a.html", "train.py", "--epochs", "1"],
        ["--steps", "5", "--html=a.html", "train.py", "--", "--epochs", "1"],
        ["--steps", "5", "-m", "package.train", "--steps", "7"],
        ["train.py", "--help"],
        ["--steps"],
        [],
    ],
)
def test_the_two_hyphens_before_the_script_may_be_left_out(words: list[str]) -> None:
    own, script = split_words(words)
    first = next((w for w in words if w in ("train.py", "-m")), None)
    at = words.index(first) if first else len(words)
    assert own == [word for word in words[:at] if word != "--"] and script == words[at:]


def test_a_usage_error_of_the_script_is_shown_as_such(tmp_path: Path) -> None:
    parser = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--epochs', required=True)\np.parse_args()"
    (tmp_path / "train.py").write_text(parser)
    done = subprocess.run(
        ["lockstep", "audit", "train.py", "--epoch"], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "lockstep: train.py --epoch did not accept its flags, and nothing was audited:" in done.stderr
    assert "train.py: error: argument --epochs: expected one argument" in done.stderr and not done.stdout
