"""Memory of each rank for a DiT of about 1 and 7 billion parameters, by what is sharded; computed, not measured.

python benchmarks/sharding.py [--width 1792 --depth 25] [--ranks 8 64] [--tokens 256]
python benchmarks/sharding.py --checkpoint 10 --ranks 8 --out /fast/disk    (measured: time to save and load so many GB)

Models are on the meta device, where tensors have a shape and no memory: sizes of parameters, gradients, AdamW's state
and one average follow from them. What a rank holds of each comes from the code that shards: a parameter belongs to one
rank whole (optimizer), or each rank has some rows of it, rounded up, and of two blocks all (full). Activations of one
sample are the tensors that the forward pass of one block, run on the meta device in bfloat16, keeps for the backward
pass, times the number of blocks.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.checkpoint import Checkpoints, load
from lockstep.distributed import World, session
from lockstep.pieces import Piece
from lockstep.recipes.dit.model import DiT, Size
from lockstep.sharding import RankFiles, Shares
from lockstep.sharding.blocks import find_blocks, recompute

GIB = float(1 << 30)
SIZES = {"1 billion": Size(1792, 17, 14), "7 billion": Size(4096, 23, 32)}
"""Width, depth, heads."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    state: float
    """AdamW's two numbers for each parameter, and one average."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state


def build(size: Size) -> nn.Module:
    with torch.device("meta"):
        return DiT(size, patch=2, side=32, classes=1000)


def memory(model: nn.Module, shard: str, ranks: int) -> Memory:
    """Return what the rank with the most holds, in float32."""
    whole = 4.0 * sum(p.numel() for p in model.parameters())
    if shard == "none":
        return Memory(whole, whole, 3 * whole)
    if shard == "optimizer":
        worst = max(_owned(model, World(rank=rank, size=ranks)) for rank in range(ranks))
        return Memory(whole, whole, 3 * worst)
    rows = 4.0 * sum(-(-len(p) // ranks) * p[0].numel() for p in model.parameters())
    gathered = 2 * max(_bytes(block) for block in find_blocks(model)) + _bytes_outside(model)
    return Memory(rows + gathered, rows + max(_bytes(block) for block in find_blocks(model)), 3 * rows)


def _owned(model: nn.Module, world: World) -> float:
    return _sum(Shares(model, world).parameters(model).values())


def _bytes(module: nn.Module) -> float:
    return _sum(module.parameters())


def _bytes_outside(model: nn.Module) -> float:
    return _bytes(model) - sum(_bytes(block) for block in find_blocks(model))


def _sum(parameters: object) -> float:
    return 4.0 * sum(p.numel() for p in parameters)  # type: ignore[attr-defined]


def activations(size: Size, tokens: int, what: str) -> float:
    """Return the bytes that the blocks keep for the backward pass of one sample."""
    model = build(size).to(torch.bfloat16)
    if what == "blocks":
        recompute(model, "blocks")
    block = find_blocks(model)[0]
    own = {p.untyped_storage()._cdata for p in block.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata  # views share one
        if storage not in own:
            kept[storage] = tensor
        return tensor

    x = torch.zeros(1, tokens, size.width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    condition = torch.zeros(1, size.width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, condition)
    return float(sum(t.untyped_storage().nbytes() for t in kept.values())) * size.depth


def start_ranks(gigabytes: float, ranks: int, out: str | None) -> None:
    """Save and load a checkpoint of so many GB with ranks of this machine."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
        own = ["--checkpoint", str(gigabytes), "--out", folder]
        subprocess.run([sys.executable, *launcher, *own], check=True, env={"OMP_NUM_THREADS": "1", **os.environ})


def save_and_load(world: World, gigabytes: float, folder: Path) -> None:
    """Print how long training waits for a save (the worst rank), until it is on the disk, and for loading all of it."""
    count = max(1, round(gigabytes * 1e9 / world.size / 4 / (64 * 4096)))
    rows = {f"model/{i}": Piece(torch.randn(64, 4096, device=world.device), 64 * world.rank) for i in range(count)}
    files, checkpoints = RankFiles(world), Checkpoints(folder / "checkpoints") if world.is_main else None
    world.barrier()
    start = time.perf_counter()
    if checkpoints is not None:
        checkpoints.save(1, {}, {}, shards=files.of(rows))
    else:
        files.follow(rows)
    pause = time.perf_counter() - start
    files.wait() if checkpoints is None else checkpoints.wait()
    pauses, disk = world.gather(pause), time.perf_counter() - start
    if checkpoints is not None:
        if failure := checkpoints.failure():
            raise SystemExit(failure)
        start = time.perf_counter()
        size = sum(t.nbytes for t in load(folder / "checkpoints" / "step-00000001").tensors["model"].values())
        world.print(
            f"{size / 1e9:.2f} GB by {world.size} ranks on {world.device.type}: pause {max(pauses):.2f} s, on the disk "
            f"after {disk:.2f} s, verified and loaded whole in {time.perf_counter() - start:.2f} s"
        )
    world.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--checkpoint", type=float, metavar="GB")
    parser.add_argument("--out", metavar="FOLDER")
    own = parser.parse_args()
    if own.checkpoint and "RANK" in os.environ:
        with session() as world:
            save_and_load(world, own.checkpoint, Path(own.out))
    elif own.checkpoint:
        start_ranks(own.checkpoint, own.ranks[0], own.out)
    else:
        print_memory(own)


def print_memory(own: argparse.Namespace) -> None:
    sizes = {"given": Size(own.width, own.depth, max(1, own.width // 64))} if own.width else SIZES
    say: Callable[[str], None] = print
    for name, size in sizes.items():
        model = build(size)
        say(f"DiT of {name}: {sum(p.numel() for p in model.parameters()):,} parameters, width {size.width}, "
            f"depth {size.depth}")  # fmt: skip
        for ranks in own.ranks:
            for shard in ("none", "optimizer", "full"):
                m = memory(model, shard, ranks)
                say(f"  {ranks} ranks, --shard {shard}: weights {m.weights / GIB:.1f}, gradients "
                    f"{m.gradients / GIB:.1f}, optimizer and one average {m.state / GIB:.1f}, together "
                    f"{m.total / GIB:.1f} GiB")  # fmt: skip
        kept = [activations(size, own.tokens, what) / GIB for what in ("none", "blocks")]
        say(f"  activations of one sample of {own.tokens} tokens: {kept[0]:.2f} GiB, recomputed in blocks "
            f"{kept[1]:.3f} GiB")  # fmt: skip


if __name__ == "__main__":
    main()
