"""One run, started in every way there is; and how runs end that do not go to plan."""

import json
import os
import re
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import tiny
from processes import environment, process_of

from multi.ranks import free_port

pytestmark = pytest.mark.slow

TINY = f"{tiny.__file__}:Tiny"
SCRIPT = "from tiny import Tiny\n\nfrom lockstep import train\n\nif __name__ == '__main__':\n    train(Tiny)\n"


def run(command: list[str], folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(**extra), capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def receipt(folder: Path, out: str = "here") -> dict[str, str]:
    return json.loads((folder / out / "receipt.json").read_text())


WAYS = {
    "lockstep": (["lockstep", "train", TINY], 1),
    "lockstep nproc": (["lockstep", "train", TINY, "--nproc", "2"], 2),
    "script": (["python", "train.py"], 1),
    "script nproc": (["python", "train.py", "--nproc", "2"], 2),
    "torchrun standalone": (["torchrun", "--nproc_per_node=2", "--standalone", "train.py"], 2),
    "torchrun port": (["torchrun", "--nproc_per_node=2", "--master_port=PORT", "train.py"], 2),
    "torchrun module": (["torchrun", "--nproc_per_node=2", "--standalone", "-m", "lockstep", "train", TINY], 2),
    "launch": (["python", "-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port=PORT", "train.py"], 2),
    "launch env": (
        [
            "python",
            "-m",
            "torch.distributed.launch",
            "--use_env",
            "--nproc_per_node=2",
            "--master_port=PORT",
            "train.py",
        ],
        2,
    ),
    "older launch": (["torchrun", "--nproc_per_node=1", "--standalone", "train.py", "--local_rank=0"], 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start_gives_the_run(way: str, folder: Path) -> None:
    words, world = WAYS[way]
    words = [word.replace("PORT", str(free_port())) for word in words]
    done = run([*words, "--out", "here", "--n_steps", "4"], folder)
    assert done.returncode == 0, done.stderr
    assert receipt(folder)["world"].startswith(f"{world},")
    assert receipt(folder)["global batch"].endswith(f"= {8 * world}")
    assert done.stdout.count("receipt") >= 1 and done.stdout.count("global batch") == 1  # rank 0 alone speaks
    assert (folder / "here/model.pth").exists()


@pytest.mark.slow
def test_a_debugger_that_sets_the_environment_itself(folder: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = ["python", "train.py", "--distributed", "--local_rank", "0", "--out", "here"]
    done = run(command, folder, **variables)
    assert done.returncode == 0, done.stderr
    assert "gloo" in receipt(folder)["world"]


@pytest.mark.slow
def test_two_nodes_on_one_machine_by_node_rank(folder: Path) -> None:
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            ["torchrun", "--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}",
             "--nproc_per_node=1", "train.py", "--out", "here", "--n_steps", "4"],
            cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    for node in nodes:
        _, errors = node.communicate(timeout=300)
        assert node.returncode == 0, errors
    assert receipt(folder)["world"].startswith("2,")


@pytest.mark.slow
def test_distributed_without_the_environment_runs_alone_and_says_so(folder: Path) -> None:
    done = run(["python", "train.py", "--ddp", "--out", "here", "--n_steps", "2"], folder)
    assert done.returncode == 0, done.stderr
    assert "there is one process; start it with torchrun or --nproc" in " ".join(done.stdout.split())


def started(command: list[str], folder: Path, real: bool = False, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, env=environment(real, **extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read its output up to a line that holds `text`."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} never came: {read}\n{process.stderr.read() if process.stderr else ''}")


def alive(folder: Path) -> list[psutil.Process]:
    """Processes that work in `folder`, but those that are just ending."""
    found = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)]
    return psutil.wait_procs(found, timeout=60)[1]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_ctrl_c_saves_and_says_how_to_go_on(folder: Path, nproc: str) -> None:
    out = str(folder / "here")
    process = started(["lockstep", "train", TINY, "--nproc", nproc, "--n_steps", "1000000", "--out", out], folder)
    wait_for(process, "step 10/")
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and errors.strip() == ""
    step = int(re.search(r"stopped by SIGINT after step (\d+)", rest).group(1))  # type: ignore[union-attr]
    assert (folder / f"here/checkpoints/step-{step:08d}/manifest.json").exists()
    assert not alive(folder)
    assert "SIGINT: stopping after the next step; press Ctrl-C again to stop now, unsaved work is lost" in rest
    command = rest.split("go on with:")[1].split()
    assert command == ["lockstep", "train", "--resume", out, "--nproc", nproc]
    done = run([*command, "--n_steps", str(step + 5)], folder)
    assert done.returncode == 0, done.stderr
    assert f"at step {step}" in done.stdout and receipt(folder)["world"].startswith(f"{nproc},")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGHUP", "SIGQUIT"])
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_closed_terminal_saves_like_sigterm(folder: Path, nproc: str, name: str) -> None:
    flags = ["--n_steps", "1000000", "--save_every", "0", "--log_every", "5", "--nproc", nproc]
    real = (nproc, name) == ("2", "SIGHUP")  # with interpreters of their own, as users have them
    process = started(["lockstep", "train", TINY, *flags, "--out", "here"], folder, real)
    wait_for(process, "step 10/")
    process.send_signal(getattr(signal, name))
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    assert f"stopped by {name}" in rest and "Traceback" not in errors, errors
    assert any((folder / "here/checkpoints").glob("step-*"))


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_run_goes_on_when_nobody_reads_its_output_any_more(folder: Path, nproc: str) -> None:
    flags = f"--n_steps 40 --log_every 1 --save_every 0 --nproc {nproc} --out here"
    done = run(["bash", "-o", "pipefail", "-c", f"lockstep train {TINY} {flags} | head -n 1"], folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and (folder / "here/model.pth").exists()
    assert len((folder / "here/metrics.jsonl").read_text().splitlines()) >= 40
    assert "the console is off" in (folder / "here/log.txt").read_text()


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_signal_to_the_whole_group_leaves_the_loaders_processes_alone(folder: Path, nproc: str) -> None:
    flags = ["--nproc", nproc, "--num_workers", "1", "--n_steps", "1000000", "--out", "here"]
    process = subprocess.Popen(
        ["lockstep", "train", TINY, *flags], cwd=folder, env=environment(real=True), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for(process, "step 10/")
    os.killpg(process.pid, signal.SIGTERM)
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 75, errors
    assert "stopped by SIGTERM" in rest and "Traceback" not in errors, errors
    assert any((folder / "here/checkpoints").glob("step-*/manifest.json"))


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_one_message_and_no_strays(folder: Path) -> None:
    command = ["lockstep", "train", TINY, "--nproc", "2", "--n_steps", "1000000", "--out", str(folder / "here")]
    process = started(command, folder)
    wait_for(process, "step 10/")
    launcher = process_of(process.pid)
    children = [int(p) for p in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    victim = next(c for c in children if b"RANK=1" in Path(f"/proc/{c}/environ").read_bytes().split(b"\0"))
    os.kill(process_of(victim), signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 137
    assert "rank 1 was ended by SIGKILL" in errors
    assert "Traceback" not in errors, errors
    assert not alive(folder)


BROKEN = """
import torch
from tiny import Tiny
from lockstep import train

class Broken(Tiny):
    name = "broken"
    def loss(self, model, batch, rng):
        if torch.distributed.get_rank() == 1 and self.calls == 3:
            raise KeyError("the first failure")
        return super().loss(model, batch, rng)

if __name__ == "__main__":
    train(Broken)
"""


@pytest.mark.slow
def test_the_first_failure_is_the_one_that_is_seen(folder: Path) -> None:
    (folder / "broken.py").write_text(BROKEN)
    done = run(["python", "broken.py", "--nproc", "2", "--out", "here"], folder)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and "rank 1: Traceback" in done.stderr
    assert "the first failure" in done.stderr
    assert not alive(folder)


@pytest.mark.slow
def test_the_cause_is_the_last_thing_that_torchrun_prints(folder: Path) -> None:
    (folder / "broken.py").write_text(BROKEN)
    done = run(["torchrun", "--nproc_per_node=2", "--standalone", "broken.py", "--out", "here"], folder)
    cause = done.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert "rank      : 1" in cause and "KeyError: 'the first failure'" in cause and "broken.py" in cause, done.stderr


WRONG = {
    "lockstep: the training set has 10 samples, fewer than": ["--size", "10", "--batch_size", "64"],
    "lockstep: cannot write to train.py/run": ["--out", "train.py/run"],
    "batch_size": ["--batch_sise", "4"],
    "best_metric is one of loss, absolute, not accuracy": ["--best_metric", "accuracy", "--eval_every", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [*(("nproc", said) for said in WRONG), *(("torchrun", said) for said in WRONG if "lockstep:" not in said)],
)
def test_what_the_user_got_wrong_is_said_once_with_status_2(how: str, said: str, folder: Path) -> None:
    start = ["python", "train.py", "--nproc", "2"]
    if how == "torchrun":
        start = ["torchrun", "--nproc_per_node=2", "--standalone", "train.py"]
    done = run([*start, "--out", "here", *WRONG[said]], folder)
    assert done.returncode == (2 if how == "nproc" else 1), done.stderr
    assert done.stderr.partition("Traceback")[0].count(said) == 1, done.stderr
    if how == "nproc":
        assert "Traceback" not in done.stderr
    elif said != "batch_size":  # flags are refused by the parser, which prints a box of its own
        assert said in done.stderr.rpartition("Root Cause")[2], "torchrun's summary comes last"


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        done = run(["python", "train.py"], folder, **variables, MASTER_PORT=str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "is in use; choose another with --master_port or MASTER_PORT" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_never_comes_is_reported_after_the_timeout(folder: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = run(["python", "train.py", "--timeout", "3"], folder, **variables, MASTER_PORT=str(free_port()))
    assert done.returncode == 2
    assert "are all 2 of them started" in done.stderr and "within 3 s" in done.stderr


def test_commands_explain_themselves(folder: Path) -> None:
    assert "lockstep train RECIPE" in run(["lockstep"], folder).stdout
    done = run(["lockstep", "tran"], folder)
    assert done.returncode == 2 and "did you mean 'train'" in done.stderr
    done = run(["lockstep", "train"], folder)
    assert done.returncode == 2 and "say what to train" in done.stderr
    assert "dit" in run(["lockstep", "recipes"], folder).stdout


SLOW_END = """
import time
from tiny import Generating
from lockstep import train

class SlowEnd(Generating):
    name = "slow"
    score_every = 0
    def loss(self, model, batch, rng):
        if not model.training:
            print("evaluating", flush=True)
            time.sleep(0.3)
        return super().loss(model, batch, rng)
    def sample_sets(self):
        return {"few": {"n": 1000}}
    def sample(self, model, index, rng, **settings):
        print("sampling", flush=True)
        time.sleep(0.3)
        return super().sample(model, index, rng, **settings)

if __name__ == "__main__":
    train(SlowEnd)
"""


@pytest.mark.parametrize("during", ["evaluating", "sampling"])
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_ctrl_c_after_the_last_step_leaves_a_complete_run(folder: Path, nproc: str, during: str) -> None:
    (folder / "slow.py").write_text(SLOW_END)
    flags = ["--nproc", nproc, "--n_steps", "4", "--sample_every", "100", "--out", "here"]
    process = started(["python", "slow.py", *flags, "--batch_size", "4"], folder)
    wait_for(process, during)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and not errors, errors
    what = {"evaluating": "the final evaluation", "sampling": "the last samples and scores"}[during]
    assert f"SIGINT ended {what}; training is complete" in " ".join(rest.split())
    assert (folder / "here/model.pth").exists() and "here/checkpoints/step-00000004" in rest
    assert not any((folder / "here").glob("samples/step-*")) and not alive(folder)


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_second_ctrl_c_ends_at_once(folder: Path, nproc: str) -> None:
    (folder / "slow.py").write_text(SLOW_END.replace("0.3", "1000"))
    process = started(["python", "slow.py", "--nproc", nproc, "--n_steps", "4", "--out", "here"], folder)
    wait_for(process, "evaluating")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.5)
    process.communicate(timeout=300)
    assert process.returncode == 130


def test_a_script_from_standard_input_is_refused_several_processes(folder: Path) -> None:
    code = (folder / "train.py").read_text().replace("train(Tiny)", 'train(Tiny, ["--nproc", "2", "--out", "here"])')
    assert '"--nproc"' in code
    done = run(["bash", "-c", f"python - <<'END'\n{code}\nEND"], folder)
    assert done.returncode == 2 and "--nproc 2 runs a script in 2 processes, and this is no file" in done.stderr
