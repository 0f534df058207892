"""Every training command of the five guides, as printed, from its example folder; GPUs become CPU processes.

A command that asks for more than two GPUs gets two processes, but for two of them that run as printed: what each
rank does is the same, and two cores start eight processes slowly. LOCKSTEP_ALL_RANKS=1 gives each what it asks
for, but two nodes, which are on this machine and get one process each.
"""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import ROOT, environment

from multi.ranks import free_port


@dataclass
class Expected:
    """Of a command: how many ranks, the learning rate, and further words of the receipt."""

    world: int = 2
    lr: str = ""
    registers: int = 0


def dit(world: int, registers: int = 0, lr: str = "0.0001") -> Expected:
    return Expected(world, lr, registers)


DIT = {
    "bash run_ddp.sh": dit(2),
    "bash run_ddp.sh --num_register_tokens 4": dit(2, 4),
    "bash run_ddp.sh --num_register_tokens 8 --batch_size 64 --lr 2e-4": dit(2, 8, "0.0002"),
    "CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --nproc_per_node=4 --master_port=29500 train.py": dit(4),
    "CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --nproc_per_node=4 --master_port=29500 train.py"
    " --num_register_tokens 4 --batch_size 64": dit(4, 4),
    "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 torchrun --nproc_per_node=8 --master_port=29500 train.py"
    " --num_register_tokens 8": dit(8, 8),
    "bash run_single_gpu.sh": dit(1),
    "bash run_single_gpu.sh --num_register_tokens 4": dit(1, 4),
    "bash run_single_gpu.sh --num_register_tokens 8 --batch_size 256 --lr 2e-4": dit(1, 8, "0.0002"),
    "CUDA_VISIBLE_DEVICES=6 torchrun --nproc_per_node=1 --master_port=29500 train.py --num_register_tokens 4": dit(
        1, 4
    ),
    "torchrun --nproc_per_node=4 --master_port=29501 train.py": dit(4),
}
JIT = {
    "./train.sh": Expected(1, "5e-05"),
    "./train_multi_gpu.sh 2": Expected(2, "5e-05"),
    "./train_multi_gpu.sh 4": Expected(4, "5e-05"),
    "torchrun --nproc_per_node=2 --master_port=29500 train.py --data_path ./data/train --batch_size 64 --epochs 100"
    " --use_amp --use_wandb": Expected(2, "5e-05"),
    "python -m torch.distributed.launch --nproc_per_node=2 --master_port=29500 train.py --data_path ./data/train"
    " --batch_size 64 --epochs 100": Expected(2, "5e-05"),
    "torchrun --nproc_per_node=2 --master_port=29500 train.py --data_path ./data/train --model JiT-B/4 --img_size 64"
    ' --batch_size 64 --epochs 100 --lr 1e-4 --use_amp --use_wandb --wandb_project "jit-diffusion"'
    ' --wandb_name "jit-v1-2gpu"': Expected(2, "0.0001"),
}
SCRIBBLE = {
    "bash train_torchrun.sh": Expected(2, "0.00025"),
    "torchrun --nproc_per_node=2 --standalone train.py --distributed": Expected(2, "0.00025"),
    "torchrun --nproc_per_node=4 --standalone train.py --distributed": Expected(4, "0.0005"),
    "bash train_ddp.sh": Expected(2, "0.00025"),
    "python -m torch.distributed.launch --nproc_per_node=2 --use_env train.py --distributed": Expected(2, "0.00025"),
    "python train.py --layers 50 --model_type res50_ASPP_lorm": Expected(1, "0.000125"),
    "python train.py --distributed --local_rank=0": Expected(1, "0.000125"),
}
_PDB = "train.py --pdb_path data/cache --cache_dir data/cache"
PROTEIN = {
    f"torchrun --nproc_per_node=8 {_PDB} --epochs 50 --batch_size 8": Expected(8, "0.0001"),
    f"torchrun --nproc_per_node=4 {_PDB} --epochs 50 --batch_size 8": Expected(4, "0.0001"),
    f"torchrun --nproc_per_node=2 {_PDB} --epochs 50 --batch_size 8": Expected(2, "0.0001"),
    f"CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --nproc_per_node=4 {_PDB} --epochs 50 --batch_size 8": Expected(
        4, "0.0001"
    ),
    f"python {_PDB.replace('train.py', 'train.py --ddp')} --epochs 50 --batch_size 8": Expected(1, "0.0001"),
    f"python {_PDB} --epochs 50 --batch_size 4": Expected(1, "0.0001"),
    f"torchrun --nproc_per_node=8 {_PDB} --epochs 50 --batch_size 8 --learning_rate 1e-4 --hidden_dim 256"
    " --num_encoder_layers 3 --num_decoder_layers 3 --mask_ratio 0.15 --save_dir checkpoints": Expected(8, "0.0001"),
    f"torchrun --nproc_per_node=2 {_PDB} --epochs 5 --batch_size 4 --save_dir checkpoints_test": Expected(2, "0.0001"),
}
_MAIN = "main.py --config configs/ddp_example.yaml --task"
_NODES = '--nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr="192.168.1.100" --master_port=29500'
VISION = {
    f"torchrun --nproc_per_node=4 {_MAIN} train": Expected(4),
    f"torchrun {_NODES} {_MAIN} train": Expected(8),
    f"python -m torch.distributed.launch --nproc_per_node=4 {_MAIN} train": Expected(4),
    f"python -m torch.distributed.launch {_NODES} {_MAIN} train": Expected(8),
    "./run_ddp.sh": Expected(2),
}
GUIDES = {
    "dit": ("000_e1f57c81ee270f98", DIT),
    "jit": ("001_2f1e7a2fa900e81c", JIT),
    "scribble": ("002_0f32113b7137e58b", SCRIBBLE),
    "protein": ("003_ded4620450c0f562", PROTEIN),
    "vision": ("004_0772a98efcf2322e", VISION),
}
AS_PRINTED = {
    "torchrun --nproc_per_node=4 --master_port=29501 train.py",
    f"torchrun --nproc_per_node=8 {_PDB} --epochs 50 --batch_size 8",
}
"""Commands that get all the processes they ask for."""
REAL = {"bash run_ddp.sh", f"torchrun --nproc_per_node=2 {_PDB} --epochs 5 --batch_size 4 --save_dir checkpoints_test"}
"""A script and a command whose processes import all they need themselves; the others are forked by the zygote.

LOCKSTEP_REAL=1 starts all of them so.
"""
DATA = {"jit": "data", "protein": "data/cache", "vision": "data"}
"""What `lockstep data` has to be told first, as the example's README says."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A copy of the examples with their data, as a user has them."""
    copies = {}
    for name in GUIDES:
        copies[name] = tmp_path_factory.mktemp("examples") / name
        ignored = shutil.ignore_patterns("runs", "data", "log", "checkpoints*", "__pycache__")
        shutil.copytree(ROOT / "examples" / name, copies[name], ignore=ignored)
        if name in DATA:
            done = run(f"lockstep data {name} {DATA[name]}", copies[name])
            assert done.returncode == 0, done.stderr
    return copies


def run(command: str, folder: Path, real: bool = False, **extra: str) -> subprocess.CompletedProcess[str]:
    """As printed, but on a port that is free here."""
    command = re.sub(r"--master_port=\d+", f"--master_port={free_port()}", command)
    variables = environment(real, LOCKSTEP_SMOKE="2", WANDB_MODE="offline", MASTER_PORT=str(free_port()), **extra)
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False
    )


def at_home(command: str, expected: Expected) -> tuple[str, int]:
    """The command for a machine with two cores and no second node, and its number of ranks."""
    world = min(expected.world, 2)
    if "--nnodes=2" in command:  # both nodes are here, one process each
        here = command.replace("192.168.1.100", "127.0.0.1").replace("--nproc_per_node=4", "--nproc_per_node=1")
        port = free_port()
        here = re.sub(r"--master_port=\d+", f"--master_port={port}", here)
        there = here.replace("--node_rank=0", "--node_rank=1")
        return f"{there} > second.log 2>&1 & {here}; status=$?; wait; exit $status", world
    if command in AS_PRINTED or os.environ.get("LOCKSTEP_ALL_RANKS") == "1":
        return command, expected.world
    command = re.sub(r"(--nproc_per_node=|multi_gpu.sh )[48]", r"\g<1>2", command)
    return command, world


def plain_dit() -> int:
    from lockstep.recipes.dit.model import build

    return sum(p.numel() for p in build("DiT-S/2", side=32, classes=10, depth=2).parameters())


def cases() -> list[tuple[str, str]]:
    """Each command, but of those that are the same here (on four GPUs and on two, say) only one."""
    portless = re.compile(r"port=\d+")
    found = {}
    for name, (_, commands) in GUIDES.items():
        for command, expected in commands.items():
            found.setdefault((name, portless.sub("", at_home(command, expected)[0])), command)
    return [(name, command) for (name, _), command in found.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), cases())
def test_a_printed_command_trains(name: str, command: str, folders: dict[str, Path], tmp_path: Path) -> None:
    expected = GUIDES[name][1][command]
    line, world = at_home(command, expected)
    folder = tmp_path / name
    shutil.copytree(folders[name], folder)
    done = run(line, folder, real=command in REAL)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    (path,) = list(folder.rglob("receipt.json"))
    receipt = json.loads(path.read_text())
    assert receipt["global batch"] == f"2 micro-batch × 1 accumulation × {world} world = {2 * world}"
    lr = expected.lr
    if name == "scribble":  # it follows the global batch, whatever that is made of
        lr = f"{1e-3 * 2 * world / 16:g}"
    assert receipt["learning rate"].startswith(lr), receipt["learning rate"]
    if name == "dit":  # a try-out has two of the twelve blocks
        assert receipt["recipe"] == "dit: DiT-S/2, 2 of 12 blocks"
        assert receipt["parameters"] == f"{plain_dit() + expected.registers * 384:,}"
    assert done.stdout.count("global batch") == 1  # rank 0 alone speaks
    checkpoints = [p.name for p in (path.parent / "checkpoints").iterdir() if p.is_dir() and not p.is_symlink()]
    assert checkpoints == ["step-00000002"] and (path.parent / "model.pth").exists()
    if "save_dir" in command:
        assert path.parent.name == command.split("--save_dir ")[1].split()[0]
    if "use_wandb" in command:
        assert "wandb sync" in done.stdout
    if name == "scribble":
        assert any((folder / "log").iterdir())


@pytest.mark.slow
def test_the_scripts_take_ports_and_process_counts_from_the_environment(tmp_path: Path) -> None:
    flags = f"--model DiT-Nano/8 --out {tmp_path}/run"
    done = run(f"bash run_ddp.sh {flags}", ROOT / "examples/dit", NUM_GPUS="3")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run/receipt.json").read_text())["world"].startswith("3,")


@pytest.mark.slow
def test_the_debuggers_settings_train_one_rank(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["scribble"], tmp_path / "scribble")
    text = (folder / ".vscode/launch.json").read_text()
    settings = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.M))
    (debug,) = [c for c in settings["configurations"] if c["name"] == "Debug DDP Training"]
    variables = {**debug["env"], "MASTER_PORT": str(free_port())}
    command = ["python", *debug["program"].replace("${workspaceFolder}/", "").split(), *debug["args"]]
    done = subprocess.run(
        command, cwd=folder, env=environment(LOCKSTEP_SMOKE="2", **variables), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 world = 2" in done.stdout


@pytest.mark.slow
def test_help_of_the_example_lists_its_flags_with_the_guides_defaults() -> None:
    done = run("torchrun --nproc_per_node=1 train.py --help", ROOT / "examples/dit")
    text = " ".join(done.stdout.replace("│", " ").split())
    for flag, default in [("num_register_tokens INT", "0"), ("batch_size INT", "128"), ("lr FLOAT", "0.0001")]:
        assert re.search(rf"--{flag} [^(]*(\([^d][^)]*\)[^(]*)?\(default: {re.escape(default)}\)", text), flag
    assert "(default: 200000)" in text


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_is_covered(name: str) -> None:
    """The guides lie beside the repository in our workshop; where they do not, there is nothing to compare."""
    number, commands = GUIDES[name]
    guide = ROOT.parent / "shared/seeds" / f"{number}.txt"
    if not guide.exists():
        pytest.skip("the guide is not here")
    text = re.sub(r"\s*\\\n\s*", " ", guide.read_text())
    start = r"(?:CUDA_VISIBLE_DEVICES=\S+ )?(?:bash (?:run|train)_|torchrun |\./|python (?:-m torch|train|main))"
    printed = {line.replace(" [其他参数]", "").strip() for line in re.findall(rf"^{start}.*$", text, re.M)}
    printed = {line for line in printed if "--help" not in line and "..." not in line and "[" not in line}
    tasks = {line for line in printed if re.search(r"--task (test|predict)$", line)}
    assert printed - tasks <= set(commands), printed - tasks - set(commands)
    assert len(printed) >= 5
    scripts = [ROOT / "examples" / name / line.split()[0] for line in printed if line.startswith("./")]
    assert all(os.access(script, os.X_OK) for script in scripts)
