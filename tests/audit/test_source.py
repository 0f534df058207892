"""What the audit reads from a script's source, and the numbers by which it knows samples."""

from collections import UserDict
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from lockstep.audit.loaded import reads_entry
from lockstep.audit.probes.files import _PROGRESS
from lockstep.audit.probes.tensors import sample_hashes, tensors
from lockstep.audit.recorder import unpacked
from lockstep.audit.source import Site, depends_on_rank
from lockstep.script import declared_flag

READ = {
    "at once": "torch.load(p)['epoch']",
    "by a name": "c = torch.load(p)\nstart = c['epoch']",
    "with a default": "with open(p) as f:\n    c: dict = torch.load(f)\nstart = c.get('epoch', 0) + 1",
    "of an attribute": "class Run:\n    def go(self):\n        self.c = torch.load(p)\n        return self.c['epoch']",
    "by way of a function": "def read(p):\n    c = torch.load(p)\n    return c\nstate = read(p)\nstate.pop('epoch')",
    "in a function": "def go(n, *, state):\n    return state['epoch']\ngo(1, state=torch.load(p))",
    "in a method": "class Run:\n    def go(self, state):\n        return state['epoch']\nRun().go(torch.load(p))",
    "used before it is defined": "def go():\n    c = read()\n    c['epoch']\ndef read():\n    return torch.load(p)",
}
READ |= {
    "if there is one": "c = torch.load(p) if p else None\nif c:\n    start = c['epoch']",
    "of a copy": "c = dict(torch.load(p))\nc['epoch']",
    "of one of two": "def read(p):\n    return torch.load(p)\nc, name = read(p)\nc['epoch']",
    "all at once": "def go(model, epoch):\n    pass\ngo(**torch.load(p))",
    "beside another": "c, n = torch.load(p), 1\nc['epoch']",
    "of a cast": "c = typing.cast(dict, torch.load(p)).copy()\nc['epoch']",
    "of what was added": "state = {'epoch': 0}\nstate.update(torch.load(p))\nstart = state['epoch']",
    "of an outer function": "def run():\n    c = torch.load(p)\n    def go():\n        return c['epoch']\n    go()",
    "of a global": "def run():\n    global c\n    c = torch.load(p)\nrun()\nc['epoch']",
    "under another name": "import torch as T\nc = T.load(p)\nc['epoch']",
}
NOT_READ = {
    "other entries": "c = torch.load(p)\nmodel.load_state_dict(c['model'])",
    "a comment": "c = torch.load(p)\n# start = c['epoch']",
    "a string": "c = torch.load(p)\nprint(\"c['epoch']\")",
    "another dict": "c = torch.load(p)\nfor row in history:\n    print(row['epoch'])",
    "said": "c = torch.load(p)\nprint('weights of epoch', c['epoch'])\nlog.info(f'epoch {c[\"epoch\"]}')",
    "settings": "c = torch.load(p)\nsettings = yaml.load(f)\nlast = settings['epoch']",
    "an entry of another list": "runs[0] = torch.load(p)\nrows = yaml.load(f)\nlast = rows[0]['epoch']",
    "beside it": "model, c = build(), torch.load(p)\nout = model(x)\nlast = out['epoch']",
    "written": "c = torch.load(p)\nc['epoch'] = 3",
    "deleted": "c = torch.load(p)\ndel c['epoch']",
    "of an optimizer by hand": "def resume():\n    state = torch.load(p)\n    model.load_state_dict(state['model'])\n"
    "class Adam:\n    def step(self):\n        for state in self.states:\n            state['step'] += 1",
    "of a parameter": "state = torch.load(p)\ndef go(state):\n    return state['epoch']\ngo(settings)",
    "of another file format": "c = torch.load(p)\nsettings = json.load(f)\nlast = settings['epoch']",
}


@pytest.mark.parametrize("way", READ)
def test_a_script_that_reads_how_far_training_was(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(READ[way])
    assert reads_entry([str(tmp_path / "train.py")], ["step", "epoch"]) is True


@pytest.mark.parametrize("way", NOT_READ)
def test_a_script_that_does_not_read_it(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(NOT_READ[way])
    assert reads_entry([str(tmp_path / "train.py")], ["step", "epoch"]) is False


def test_a_script_that_reads_a_file_of_json(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("with open(p) as f:\n    state = json.load(f)\nstart = state['epoch']")
    assert reads_entry([str(script)], ["epoch"], "json") is True and reads_entry([str(script)], ["epoch"]) is False


OF_THE_RANK = (
    "rank == 0", "local_rank", "not is_main", "dist.get_rank() == 0", "accelerator.is_main_process", "args.rank == 0",
    "self.global_rank < 1", "int(os.environ['RANK']) == 0", "os.environ.get('SLURM_PROCID') == '0'", "RANK != 0",
    "isMaster", "trainer.is_global_zero", "master_process and step % 10 == 0", "jax.process_index() == 0",
    "rank0", "leader", "is_local_main_process()", "state.is_world_process_zero",
)  # fmt: skip
NOT_OF_THE_RANK = (
    "__name__ == '__main__'", "mask.nonzero().any()", "remaining > 3", "main(args)", "args.mode == 'main'", "zero_grad",
    "domain == 'x'", "locals()", "args.master_port", "ranking[0] > 1", "primary_metric > best", "step % 10 == 0",
    "frank", "loss.is_zero()", "local_batch > 8", "crank_angle",
)  # fmt: skip


@pytest.mark.parametrize("branch", ["if {}:\n    dist.barrier()", "x = 1\ny = dist.barrier() if {} else 0"])
@pytest.mark.parametrize("condition", [*OF_THE_RANK, *NOT_OF_THE_RANK])
def test_a_branch_depends_on_the_rank_if_its_condition_names_it(tmp_path: Path, condition: str, branch: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(branch.format(condition))
    assert depends_on_rank(Site(str(script), 2)) == (condition in OF_THE_RANK)


def test_a_line_outside_of_the_branch_and_a_file_that_cannot_be_parsed_do_not_depend_on_the_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("if rank == 0:\n    save()\ndist.barrier()  # if rank == 0")
    (tmp_path / "cell.py").write_text("%matplotlib inline\nif rank == 0:\n    dist.barrier()")
    assert not depends_on_rank(Site(str(tmp_path / "train.py"), 3))
    assert not depends_on_rank(Site(str(tmp_path / "cell.py"), 3)) and not depends_on_rank(None)


FLAGS = ("--local_rank", "--local-rank")


def test_a_flag_is_declared_where_a_parser_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--local-rank', type=int)")
    assert declared_flag(str(script), FLAGS) == "--local-rank"
    script.write_text("# parser.add_argument('--local_rank')  torchrun sets it now\nrun(['x.py', '--local_rank'])")
    assert declared_flag(str(script), FLAGS) is None


def test_names_that_say_how_far_training_was() -> None:
    for name in (
        "epoch",
        "global_step",
        "EPOCHS_RUN",
        "iter_num",
        "finished_epoch",
        "iteration",
        "steps",
        "num_updates",
    ):
        assert _PROGRESS.fullmatch(name), name
    for name in ("timesteps", "warmup_steps", "num_epochs", "max_iter", "steps_per_epoch", "criterion", "n_steps"):
        assert not _PROGRESS.fullmatch(name), name


def test_files_are_read_together_and_what_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "store.py").write_text("def read(p):\n    return torch.load(p)")
    (tmp_path / "train.py").write_text("start = store.read(p)['epoch']")
    (tmp_path / "cell.py").write_text("%matplotlib inline")
    assert reads_entry([str(tmp_path / "store.py"), str(tmp_path / "train.py")], ["epoch"]) is True
    assert reads_entry([str(tmp_path / "cell.py"), str(tmp_path / "none.py"), "<stdin>"], ["epoch"]) is None


def row_hashes(batch: list[torch.Tensor]) -> list[int]:
    return unpacked(sample_hashes(batch)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint16])
def test_samples_of_few_values_are_told_apart(dtype: torch.dtype) -> None:
    samples = torch.tensor(list(product((0, 1), repeat=10))).to(dtype)
    assert len(set(row_hashes([samples]))) == len(samples)
    assert row_hashes([samples[5:9]]) == row_hashes([samples])[5:9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64])
def test_samples_that_differ_by_signs_are_told_apart(dtype: torch.dtype) -> None:
    samples = torch.tensor(list(product((-1, 1), repeat=10))).to(dtype)
    assert len(set(row_hashes([samples]))) == len(samples)
    assert len(set(row_hashes([torch.imag(samples.to(torch.complex64).conj() * 1j)]))) == len(samples)


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64, torch.int64])
def test_neighbours_among_large_numbers_are_told_apart(dtype: torch.dtype) -> None:
    samples = (torch.arange(64) + 2**25).to(dtype).view(-1, 1)
    assert len(set(row_hashes([samples]))) == 64


@pytest.mark.parametrize("size", [(1,), (255,), (256,), (271,), (272,), (3, 32, 32), (784,), (5, 7, 11, 13)])
def test_a_sample_has_its_number_whatever_its_size_and_its_place_in_memory(size: tuple[int, ...]) -> None:
    samples = torch.randn(12, *size)
    numbers = row_hashes([samples])
    assert len(set(numbers)) == 12 and row_hashes([samples[5:9]]) == numbers[5:9]
    strided = torch.randn(*size, 12).movedim(-1, 0).copy_(samples)
    assert row_hashes([strided]) == numbers


def test_a_change_at_the_beginning_the_end_or_between_is_seen() -> None:
    samples = torch.zeros(4, 4096)
    samples[1, 3], samples[2, 4096 - 250], samples[3, 2050] = 1, 1, 1
    assert len(set(row_hashes([samples]))) == 4


def test_samples_with_hardly_anything_in_them_are_told_apart() -> None:
    """Bags of words: few ones, at places that a look at 128 of 5,000 numbers misses."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.zeros(200, 5000).scatter_(1, torch.randint(0, 5000, (200, 10), generator=generator), 1.0)
    assert len(set(row_hashes([samples]))) == 200 and row_hashes([samples[7:9]]) == row_hashes([samples])[7:9]


def test_images_with_wide_borders_are_told_apart() -> None:
    """Digits in the middle of 224 × 224 pixels, normalised: each channel has a background of its own."""
    samples = torch.zeros(30, 3, 224, 224)
    samples[:, :, 98:126, 98:126] = torch.rand(30, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    samples = (samples - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / 0.2
    assert len(set(row_hashes([samples]))) == 30


@pytest.mark.parametrize("length", [512, 4096])
def test_texts_that_begin_and_end_alike_are_told_apart(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(0, 30_000, (length,), generator=generator).repeat(200, 1)
    samples[:, length // 2 : length // 2 + 20] = torch.randint(0, 30_000, (200, 20), generator=generator)
    samples[:, length // 2 + 20 :] = 0
    assert len(set(row_hashes([samples]))) == 200


def test_the_tensors_of_a_sample_are_known_by_themselves() -> None:
    x, y = torch.randn(40, 300), torch.arange(40) % 3
    images, labels, others, same = (unpacked(part) for z in (x, x + 1) for part in sample_hashes([z, y])[1])
    assert len(images) == len(labels) == 32 and len(set(labels)) == 3
    assert labels == same and not set(images) & set(others)


def test_tensors_are_found_in_whatever_holds_a_batch() -> None:
    @dataclass(slots=True)
    class Batch:
        x: torch.Tensor
        names: list[str]

    one = torch.ones(2)
    held = [(one, [one]), UserDict(x={"y": one}), Batch(one, ["a"]), {"a": Batch(one, []), "kind": Batch}]
    assert [len(list(tensors(batch))) for batch in held] == [2, 1, 1, 1]


def test_what_has_no_numbers_is_passed_over() -> None:
    unreadable = [torch.ones(3, 2, device="meta"), torch.ones(3, 2).to_sparse(), torch.ones(3, 0), torch.tensor(1.0)]
    assert row_hashes(unreadable) == [] and len(row_hashes([*unreadable, torch.ones(3, 2)])) == 3
