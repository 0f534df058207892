"""Sharded runs give what runs with a replica on every rank give, and leave the same files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine import lines, trainer
from safetensors.torch import load_file
from torch import Tensor

from lockstep import checkpoint
from lockstep.distributed import World

pytestmark = pytest.mark.slow

FLAGS = ["--batch_size", "4", "--global_batch_size", "24", "--log_every", "1", "--ema_decay", "0.9", "--n_steps", "8"]
FLAGS += ["--clip_grad", "1"]


def state_after(world: World, recipe: str, flags: list[str]) -> tuple[dict[str, Tensor], int]:
    """All tensors of the last state, whole on rank 0, and how many numbers of state and averages this rank keeps."""
    run = trainer(world, recipe, flags)
    run.fit()
    kept = sum(t.numel() for state in run.update.optimizer.state.values() for t in state.values())
    kept += sum(t.numel() for ema in run.state.emas for t in ema.shadow.values())
    tensors, _ = run.state.capture()
    return {f"{part}/{name}": t.clone() for part, found in tensors.items() for name, t in found.items()}, kept


def whole(answers: list[tuple[dict[str, Tensor], int]]) -> dict[str, Tensor]:
    return answers[0][0]


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]


@pytest.mark.parametrize("flags", [[], ["--optimizer", "sgd"], ["--exact"], ["--precision", "fp16"]])
def test_sharded_optimizer_state_gives_the_bits_of_ddp(ranks, tmp_path: Path, flags: list[str]) -> None:
    """Each rank has about its share of state, and rank 0 writes all of it."""
    flags = [*FLAGS, *flags]
    plain = ranks(3)(state_after, "Labelled", [*flags, "--out", str(tmp_path / "none")])
    answers = ranks(3)(state_after, "Labelled", [*flags, "--shard", "optimizer", "--out", str(tmp_path / "optimizer")])
    assert differing(whole(plain), whole(answers)) == []
    assert sum(kept for _, kept in answers) <= plain[0][1] + 3 * 8  # step counters
    assert all(kept < 0.6 * plain[0][1] for _, kept in answers)
    saved = [checkpoint.load(tmp_path / name / "checkpoints" / "last").tensors for name in ("none", "optimizer")]
    assert saved[0].keys() == saved[1].keys() >= {"model", "ema-0.9", "optimizer"}
    assert [differing(saved[0][part], saved[1][part]) for part in saved[0]] == [[] for _ in saved[0]]
    for name in ("model.safetensors", "model_ema.safetensors"):
        assert differing(load_file(tmp_path / "none" / name), load_file(tmp_path / "optimizer" / name)) == []
    assert [line["val/loss"] for line in lines(tmp_path / "none") if "val/loss" in line] == [
        line["val/loss"] for line in lines(tmp_path / "optimizer") if "val/loss" in line
    ]


def test_the_receipt_says_what_is_not_compared(ranks, tmp_path: Path) -> None:
    ranks(2)(state_after, "Tiny", [*FLAGS, "--shard", "optimizer", "--out", str(tmp_path)])
    assert "not compared between ranks" in json.loads((tmp_path / "receipt.json").read_text())["sharded"]
    state_after(World(), "Tiny", [*FLAGS, "--shard", "optimizer", "--out", str(tmp_path / "alone")])
    receipt = json.loads((tmp_path / "alone" / "receipt.json").read_text())
    assert "shard has no effect: there is one rank, and no other to share with" in receipt["notes"]


def test_an_exact_run_goes_on_with_other_ranks_and_another_strategy(ranks, tmp_path: Path) -> None:
    flags = [*FLAGS, "--exact", "--n_steps"]
    expected = whole([state_after(World(), "WithDropout", [*flags, "12", "--out", str(tmp_path / "1")])])
    for steps, size, shard in (("3", 2, "optimizer"), ("6", 3, "none"), ("9", 3, "optimizer"), ("12", 2, "none")):
        words = [*flags, steps, "--shard", shard, "--resume", "auto", "--out", str(tmp_path / "parts")]
        answers = ranks(size)(state_after, "WithDropout", words)
    assert differing(expected, whole(answers)) == []


def test_a_checkpoint_of_sharded_ranks_loads_into_a_plain_module(ranks, tmp_path: Path) -> None:
    ranks(3)(state_after, "Tiny", [*FLAGS, "--shard", "optimizer", "--out", str(tmp_path)])
    saved = checkpoint.load(checkpoint.newest(tmp_path / "checkpoints", print).path)
    model = trainer(World(), "Tiny", [*FLAGS, "--out", str(tmp_path / "other")]).model
    model.load_state_dict(saved.tensors["model"])
    assert load_file(tmp_path / "model.safetensors").keys() == dict(model.named_parameters()).keys()
    assert torch.isfinite(torch.stack([p.sum() for p in model.parameters()])).all()


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names of tensors that differ by more than rounding."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.allclose(a[name].double(), b[name].double(), rtol=1e-4, atol=1e-6)]


FULL = ["--batch_size", "4", "--global_batch_size", "24", "--log_every", "2", "--ema_decay", "0.9", "--n_steps", "6"]
FULL += ["--clip_grad", "1", "--eval_every", "3", "--precision", "fp64"]


@pytest.mark.parametrize("flags", [[], ["--optimizer", "sgd"], ["--activation_checkpointing", "selective"]])
def test_fully_sharded_ranks_give_what_ddp_gives(ranks, tmp_path: Path, flags: list[str]) -> None:
    """Also with three ranks, whose rows of a parameter are not all as many."""
    flags = [*FULL, *flags]
    plain = state_after(World(), "Deep", [*flags, "--out", str(tmp_path / "none")])
    for size in (2, 3):
        out = tmp_path / f"full-{size}"
        answers = ranks(size)(state_after, "Deep", [*flags, "--shard", "full", "--out", str(out)])
        assert close(plain[0], whole(answers)) == []
        assert all(kept < plain[1] / size * 1.25 for _, kept in answers)
        names = ("model.safetensors", "model_ema.safetensors")
        assert [close(load_file(tmp_path / "none" / name), load_file(out / name)) for name in names] == [[], []]
        losses = [[line["val/loss"] for line in lines(o) if "val/loss" in line] for o in (tmp_path / "none", out)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 2


EXACT = ["--exact", "--batch_size", "4", "--global_batch_size", "24", "--log_every", "2", "--ema_decay", "0.9"]


@pytest.mark.parametrize("flags", [["--clip_grad", "1"], ["--precision", "bf16", "--optimizer", "sgd"]])
def test_exact_fully_sharded_ranks_give_the_bits_of_one(ranks, tmp_path: Path, flags: list[str]) -> None:
    """Gradients of six tiles are summed by rows, as integers; a run goes on with another strategy."""
    flags = [*EXACT, *flags, "--activation_checkpointing", "blocks", "--n_steps"]
    alone = state_after(World(), "DeepWithDropout", [*flags, "9", "--out", str(tmp_path / "1")])[0]
    for steps, size, shard in (("3", 3, "full"), ("6", 3, "optimizer"), ("9", 2, "full")):
        words = [*flags, steps, "--shard", shard, "--resume", "auto", "--out", str(tmp_path / "parts")]
        answers = ranks(size)(state_after, "DeepWithDropout", words)
    assert differing(alone, whole(answers)) == []
    losses = [[line["loss"] for line in lines(tmp_path / name) if "loss" in line] for name in ("1", "parts")]
    assert losses[0][-1] == losses[1][-1]


def test_tiles_that_ranks_cannot_share_evenly_are_refused(ranks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cut into 6, which 4 ranks cannot share evenly"):
        ranks(4)(state_after, "Deep", [*EXACT, "--n_steps", "2", "--shard", "full", "--out", str(tmp_path)])


def test_a_run_goes_on_with_other_ranks_and_another_strategy(ranks, tmp_path: Path) -> None:
    flags = [*FULL, "--n_steps"]
    expected = state_after(World(), "Deep", [*flags, "12", "--out", str(tmp_path / "1")])[0]
    for steps, size, shard in (("3", 2, "full"), ("6", 3, "optimizer"), ("9", 3, "full"), ("12", 2, "none")):
        words = [*flags, steps, "--shard", shard, "--resume", "auto", "--out", str(tmp_path / "parts")]
        answers = ranks(size)(state_after, "Deep", words)
    assert close(expected, whole(answers)) == []


@pytest.fixture(scope="module")
def full_run(ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """The folder of a run of three ranks with two checkpoints, and its last state."""
    out = tmp_path_factory.mktemp("full")
    flags = [*FULL, "--save_every", "3", "--shard", "full", "--out", str(out)]
    return out, whole(ranks(3)(state_after, "Deep", flags))


def test_each_rank_writes_its_rows_and_any_reader_gets_whole_tensors(full_run: tuple[Path, dict[str, Tensor]]) -> None:
    """Without gathering: a third of the bytes is in each file. torch.distributed.checkpoint reads them too."""
    folder, state = full_run[0] / "checkpoints" / "last", full_run[1]
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [f"shard-0000{rank}-of-00003.safetensors" for rank in (1, 2, 3)]
    assert max(f.stat().st_size for f in files) < 0.5 * sum(f.stat().st_size for f in files)
    saved = {f"{part}/{n}": t for part, found in checkpoint.load(folder).tensors.items() for n, t in found.items()}
    assert differing(saved, state) == []
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert differing(read, state) == []


@pytest.mark.parametrize("damage", ["missing", "flipped", "truncated"])
def test_a_damaged_file_of_one_rank_is_found_and_the_checkpoint_before_used(
    full_run: tuple[Path, dict[str, Tensor]], tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(full_run[0] / "checkpoints", folder, symlinks=True)
    file = folder / "step-00000006" / "shard-00002-of-00003.safetensors"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flipped" else data[:-1])
    said: list[str] = []
    found = checkpoint.newest(folder, said.append)
    assert found is not None and found.step == 3
    assert file.name in said[0] and "using the one before it" in said[0]


def saves(world: World, flags: list[str], rank: int, phase: str) -> tuple[str | None, list[str], list[str]]:
    """What rank 0 says of a save while a rank cannot write, the folder after it, and after the next save."""
    run = trainer(world, "Deep", flags)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    failure, listings = None, []
    with pytest.MonkeyPatch.context() as patched:
        if world.rank == rank:
            patched.setattr(
                "lockstep.checkpoint.make_folder" if phase == "folder" else "lockstep.sharding.files.write", full
            )
        for attempt in range(2):
            run._save()
            if world.is_main:
                run.checkpoints.wait()
                failure = run.checkpoints.failure() if attempt == 0 else failure
            else:
                run.rank_files.wait()
            patched.undo()
            world.barrier()
            folder = run.folder / "checkpoints"
            listings.append(sorted(path.name for path in folder.glob("*step-*")) if folder.is_dir() else [])
            world.barrier()
    return failure, *listings


@pytest.mark.parametrize(("rank", "phase"), [(1, "write"), (0, "write"), (0, "folder")])
def test_a_rank_that_cannot_write_leaves_no_checkpoint_and_the_next_save_works(
    ranks, tmp_path: Path, rank: int, phase: str
) -> None:
    answers = ranks(2)(saves, [*FULL, "--shard", "full", "--out", str(tmp_path)], rank, phase)
    failure, first, second = answers[0]
    assert failure is not None and "No space left on device" in failure
    assert phase == "folder" or f"rank {rank}: OSError" in failure
    assert (first, second) == ([], ["step-00000000"])
    assert checkpoint.load(tmp_path / "checkpoints" / "step-00000000").tensors["model"]
