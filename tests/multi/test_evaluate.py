"""Metrics over ranks are those of one process, for any size of the set and any world."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep import Evaluates, Generates, Loss, Recipe
from lockstep.distributed import World
from lockstep.evaluate import Evaluator, share


class Numbers(Recipe, Evaluates, Generates):
    """Counts what it is shown."""

    def model(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def dataset(self, split: str) -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.tensor(i)} for i in range(23)]

    def loss(self, model: Any, batch: Any, rng: Any) -> Loss:
        return Loss(rng.uniform("u").sum(), len(batch["x"]))

    def evaluate_batch(self, model: Any, batch: Any, rng: Any) -> dict[str, Any]:
        seen = torch.zeros(64, dtype=torch.int64).index_add(0, batch["x"], torch.ones_like(batch["x"]))
        return {"seen": seen, "count": len(batch["x"]), "noise": rng.uniform("u").double().sum()}

    def metrics(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        if not sums:
            return {"count": 0.0}
        return {"most": float(sums["seen"].max()), "count": float(sums["count"]), "noise": float(sums["noise"])}

    def sample_sets(self) -> dict[str, dict[str, Any]]:
        return {}

    def save_samples(self, samples: torch.Tensor, path: Any) -> list[Any]:
        return []

    def sample(self, model: Any, index: torch.Tensor, rng: Any, **settings: Any) -> torch.Tensor:
        return torch.stack([index.double(), rng.uniform("u").double()], 1)


@settings(max_examples=200, deadline=None)
@given(count=st.integers(0, 500), size=st.integers(1, 17))
def test_shares_cover_every_number_once(count: int, size: int) -> None:
    parts = [share(count, World(rank=r, size=size)) for r in range(size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def measured(world: World, counts: list[int], batch_size: int) -> list[dict[str, float]]:
    from contextlib import nullcontext

    recipe = Numbers()
    sets = [[{"x": torch.tensor(i)} for i in range(count)] for count in counts]
    evaluator = Evaluator(recipe, recipe.model(), world, nullcontext(), seed=3)
    return [evaluator.evaluate(s, batch_size)[0] for s in sets]


def test_metrics_do_not_depend_on_the_world(ranks) -> None:
    counts = [1, 2, 3, 7, 23, 64]
    alone = measured(World(), counts, 64)
    assert [value["count"] for value in alone] == counts and all(value["most"] == 1 for value in alone)
    for world in (2, 3, 4):
        for values in ranks(world)(measured, counts, 5):
            for ours, theirs in zip(alone, values, strict=True):
                assert (ours["count"], ours["most"]) == (theirs["count"], theirs["most"])
                assert abs(ours["noise"] - theirs["noise"]) < 1e-12 * max(1, ours["noise"])


def made(world: World, count: int) -> torch.Tensor | None:
    from contextlib import nullcontext

    recipe = Numbers()
    return Evaluator(recipe, recipe.model(), world, nullcontext(), seed=3).generate(count, {})


def test_samples_do_not_depend_on_the_world_and_come_in_order(ranks) -> None:
    alone = made(World(), 5)
    assert alone is not None and alone[:, 0].tolist() == [0, 1, 2, 3, 4]
    for world in (2, 3):
        first, *others = ranks(world)(made, 5)
        assert torch.equal(first, alone) and all(other is None for other in others)
    first, *_ = ranks(3)(made, 2)
    assert torch.equal(first, alone[:2])
