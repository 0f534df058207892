"""Randomness named by keys: the same whatever the batch, and random."""

import math
import shutil

import pytest
import torch

from lockstep.distributed import World
from lockstep.rng import Rng

N = 4000


QUICK = {"realize_opcount_threshold": 5}
"""Without it Inductor inlines the whole generator into every use of it, and its C++ takes a minute to compile."""


def keyed(count: int, seed: int = 0, epoch: int = 0, start: int = 0) -> Rng:
    index = torch.arange(start, start + count)
    return Rng.of(seed, torch.full_like(index, epoch), index)


def draws(rng: Rng) -> dict[str, torch.Tensor]:
    return {
        "uniform": rng.uniform("a", 3, 5),
        "normal": rng.normal("b", 7),
        "integers": rng.integers("c", 1000, 2),
        "bernoulli": rng.bernoulli("d", 0.1, 11),
    }


def test_a_sample_draws_the_same_in_any_batch() -> None:
    whole = draws(keyed(20))
    for start, stop in [(0, 1), (3, 11), (19, 20)]:
        for name, part in draws(keyed(stop - start, start=start)).items():
            assert torch.equal(part, whole[name][start:stop]), name


def test_known_values_stay() -> None:
    rng = keyed(2, seed=1, epoch=3, start=5)
    assert rng.keys.tolist() == [-1555052288630763962, -1939136048429620048]
    assert rng.integers("x", 1000, 3).tolist() == [[520, 727, 385], [314, 528, 802]]


@pytest.mark.parametrize("what", ["seed", "epoch", "index", "name"])
def test_other_keys_and_names_draw_independently(what: str) -> None:
    one = keyed(N).uniform("a", 8)
    other = {
        "seed": lambda: keyed(N, seed=1).uniform("a", 8),
        "epoch": lambda: keyed(N, epoch=1).uniform("a", 8),
        "index": lambda: keyed(N, start=1).uniform("a", 8),
        "name": lambda: keyed(N).uniform("b", 8),
    }[what]()
    correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(8 * N)


def test_elements_of_one_draw_are_independent() -> None:
    x = keyed(N).normal("a", 6).T
    correlation = torch.corrcoef(x) - torch.eye(6)
    assert correlation.abs().max() < 4.5 / math.sqrt(N)


def test_uniforms_are_uniform() -> None:
    counts = torch.histc(keyed(N).uniform("a", 50), bins=64, min=0, max=1)
    expected = 50 * N / 64
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    assert 25 < chi2 < 115  # 63 degrees of freedom: 0.001 % on either side


def test_normals_are_normal() -> None:
    x = keyed(N).normal("a", 50).double().flatten()
    count = len(x)
    assert abs(x.mean()) < 4 / math.sqrt(count)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / count)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / count)
    cuts = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    share = (x[None] < cuts[:, None]).double().mean(1)
    assert (share - torch.special.ndtr(cuts)).abs().max() < 2.5 / math.sqrt(count)


def test_integers_and_coins_have_their_frequencies() -> None:
    counts = keyed(N).integers("a", 7, 20).flatten().bincount(minlength=7)
    assert counts.shape == (7,) and (counts - 20 * N / 7).abs().max() < 4 * math.sqrt(20 * N / 7)
    assert abs(keyed(N).bernoulli("b", 0.1, 20).double().mean() - 0.1) < 4 * math.sqrt(0.09 / (20 * N))
    assert not keyed(N).bernoulli("c", 0.0, 9).any() and keyed(N).bernoulli("c", 1.0, 9).all()


def test_both_precisions_draw_the_same_uniforms_and_close_normals() -> None:
    rng = keyed(50)
    double = torch.float64
    assert torch.equal(rng.uniform("a", 9).double(), rng.uniform("a", 9, dtype=double))
    assert torch.equal(rng.normal("a", 9), rng.normal("a", 9, dtype=double).float())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("count", [4, 33])
def test_compiled_draws_equal_eager_ones(count: int) -> None:
    """Sizes that fill no vector register: a constant product of a loop index once broke these."""

    def act(epoch: torch.Tensor, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return draws(Rng.of(5, epoch, index))

    index = torch.arange(count)
    eager, compiled = act(index * 0, index), torch.compile(act, fullgraph=True, options=QUICK)(index * 0, index)
    for name, value in eager.items():
        if name == "normal":
            torch.testing.assert_close(compiled[name], value, rtol=5e-7, atol=1e-9)
        else:
            assert torch.equal(compiled[name], value), name


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_generators_are_seeded_as_torch_seeds_them(seed: int) -> None:
    before = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        expected, state = torch.rand(5), torch.get_rng_state()
        World().seed_generators(seed)
        assert torch.rand(5).equal(expected) and torch.get_rng_state().equal(state)
    finally:
        torch.set_rng_state(before)


def test_seeding_formats_no_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceback.format_stack", None)
    before = torch.get_rng_state()
    World().seed_generators(3)
    torch.set_rng_state(before)
