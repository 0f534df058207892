"""The network and the loss: sizes, invariance, padding, the terms by hand, one graph."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.loss import Objective
from lockstep.recipes.protein import ProteinRecipe
from lockstep.recipes.protein.chain import crop
from lockstep.recipes.protein.chemistry import MASK, RESIDUES, SYMMETRIC, TOKENS, slot_table
from lockstep.recipes.protein.measure import residue_scores, torsion_counts
from lockstep.recipes.protein.model import SideChains, Size, describe
from lockstep.recipes.protein.peptides import peptides
from lockstep.recipes.protein.recipe import ProteinOptions
from lockstep.registry import find
from lockstep.rng import Rng

SMALL = {"hidden_dim": 32, "num_encoder_layers": 2, "num_decoder_layers": 1, "num_heads": 4, "num_neighbors": 6}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def recipe(**options: Any) -> ProteinRecipe:
    return ProteinRecipe(ProteinOptions(**{**SMALL, **options}))


def network(mine: ProteinRecipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    return (mine or recipe()).model().eval()


def items(count: int) -> list[dict[str, Tensor]]:
    made = [chain.item() for chain in peptides("train", count)]
    return [{k: x.double() if x.is_floating_point() else x for k, x in item.items()} for item in made]


def keys(indices: list[int], epoch: int = 0) -> Rng:
    index = torch.tensor(indices)
    return Rng.of(5, torch.full_like(index, epoch), index)


def answers(model: nn.Module, batch: dict[str, Tensor], slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return model(batch["backbone"], batch["present"], batch["linked"], batch["slots"] if slots is None else slots)


def test_the_recipe_is_found_by_name_and_has_the_guides_defaults() -> None:
    assert find("protein") is ProteinRecipe
    o = ProteinOptions()
    assert (o.hidden_dim, o.num_encoder_layers, o.num_decoder_layers, o.num_heads) == (256, 3, 3, 8)
    assert (o.mask_ratio, o.masking_strategy, o.num_neighbors) == (0.15, "random", 30)
    d = ProteinRecipe.defaults
    assert (d["lr"], d["weight_decay"], d["clip_grad"], d["epochs"], d["batch_size"]) == (1e-4, 1e-5, 1.0, 50, 4)


def test_the_full_model_has_as_many_parameters_as_the_sum_of_its_parts() -> None:
    d, bins, edge = 256, 72, 16 * 16 + 12

    def linear(a: int, b: int) -> int:
        return a * b + b

    attention = linear(d, d) + linear(d, 2 * d) + linear(d, d)
    message = 2 * 2 * d + linear(d, d) + 2 * d * d + linear(d, d) + 2 * linear(d, d)
    encoder = linear(9, d) + linear(edge, d) + 66 * d + 2 * d + 3 * message + 2 * d
    layer = 3 * 2 * d + 2 * attention + linear(d, 4 * d) + linear(4 * d, d)
    whole = encoder + (16 + 6) * d + 3 * layer + 2 * d + linear(d, 16) + linear(d, 4 * bins)
    have = sum(p.numel() for p in ProteinRecipe().model().parameters())
    assert have == whole == 4_519_728


@pytest.mark.parametrize("kind", ["turned", "moved", "both"])
def test_predictions_do_not_change_when_the_protein_is_turned_and_moved(kind: str) -> None:
    mine = recipe()
    model, batch = network(mine), mine.collate(items(3))
    torch.manual_seed(4)
    turn, _ = torch.linalg.qr(torch.randn(3, 3))
    turn = turn * torch.linalg.det(turn).sign() if kind != "moved" else torch.eye(3)
    shift = torch.tensor([30.0, -80.0, 12.0]) if kind != "turned" else torch.zeros(3)
    moved = batch | {"backbone": torch.where(batch["present"][..., None], batch["backbone"] @ turn.T + shift, 0)}
    for one, other in zip(answers(model, batch), answers(model, moved), strict=True):
        torch.testing.assert_close(one[batch["present"][..., 1]], other[batch["present"][..., 1]], rtol=0, atol=1e-9)
    mirrored = batch | {"backbone": -batch["backbone"]}
    assert (answers(model, batch)[0] - answers(model, mirrored)[0]).abs().max() > 1e-3  # a mirror image is another one


def test_a_protein_alone_is_the_same_as_in_a_padded_batch() -> None:
    mine = recipe(num_neighbors=30)
    model, chains = network(mine), items(6)
    chains[2] = crop(chains[2], 3, 5)  # far fewer than there are neighbours to have
    together = mine.collate(chains)
    outputs = answers(model, together)
    assert together["residue"].shape[1] > 5
    for i, item in enumerate(chains):
        size = len(item["residue"])
        bare = {k: x[None] for k, x in item.items()} | {"slots": slot_table()[item["residue"]][None]}
        for one, other in zip(answers(model, bare), outputs, strict=True):
            torch.testing.assert_close(one[0], other[i, :size], rtol=0, atol=1e-9)


def test_padding_takes_no_part_in_the_graph() -> None:
    mine = recipe()
    batch = mine.collate(items(4))
    seen = describe(batch["backbone"], batch["present"], batch["linked"], 30)
    real = batch["present"][..., 1]
    rows, _, _ = seen.neighbours.shape
    for i in range(rows):
        size = int(real[i].sum())
        edges = seen.real[i, :size]
        assert (seen.neighbours[i, :size][edges] < size).all() and (edges.sum(1) == min(30, size)).all()
        assert not seen.real[i, size:].any()


def test_neighbours_are_the_nearest_and_a_missing_atom_or_a_break_is_not_felt_beyond_itself() -> None:
    item = items(1)[0]
    batch = {k: x[None] for k, x in item.items()}
    seen = describe(batch["backbone"], batch["present"], batch["linked"], 6)
    distance = torch.cdist(batch["backbone"][0, :, 1], batch["backbone"][0, :, 1])
    expected = distance.argsort(1)[:, :6]
    assert torch.equal(seen.neighbours[0].sort(1).values, expected.sort(1).values)
    size = len(item["residue"])
    cut = batch | {"linked": batch["linked"] & (torch.arange(size) != 5)}
    nodes = describe(cut["backbone"], cut["present"], cut["linked"], 6).nodes[0]
    changed = (nodes != seen.nodes[0]).any(1).nonzero().flatten().tolist()
    assert changed == [4, 5]  # psi of the one before, phi and omega of the one behind
    assert (nodes[5, [0, 2, 3, 5]] == 0).all() and nodes[5, 1] != 0


def test_what_a_masked_token_was_cannot_be_seen() -> None:
    mine = recipe()
    model, batch = network(mine), mine.collate(items(2))
    hidden = torch.where(batch["slots"] >= 4, MASK, batch["slots"])
    assert not torch.equal(answers(model, batch)[0], answers(model, batch, hidden)[0])
    other = batch | {"residue": batch["residue"].flip(1), "chi": batch["chi"] + 50}
    loss = [mine.loss(model, b, keys([0, 1])).terms["fragments"] for b in (batch, other)]
    assert torch.equal(*loss)  # only the slots tell the residues


def test_the_terms_are_those_computed_by_hand() -> None:
    mine = recipe(mask_ratio=0.4, backbone_only=0.0, torsion_weight=0.5)
    model, chains = network(mine), items(3)
    chains[1]["has_chi"][2:5] = False
    batch, rng = mine.collate(chains), keys([0, 1, 2])
    with torch.no_grad():
        terms, counts = mine.loss(model, batch, rng).terms, mine.term_counts(batch, rng)
    mask = rng.bernoulli("mask", 0.4, 512, 5)[:, : batch["slots"].shape[1]] & (batch["slots"] >= 4)
    fragments, torsions = answers(model, batch, torch.where(mask, MASK, batch["slots"]))
    total, number = 0.0, 0
    for i, j, k in mask.nonzero().tolist():
        total -= float(fragments[i, j, k].log_softmax(0)[batch["slots"][i, j, k]])
        number += 1
    assert float(terms["fragments"]) == pytest.approx(total) and int(counts["fragments"]) == number > 30
    total, number = 0.0, 0
    for i, j, k in batch["has_chi"].nonzero().tolist():
        bins = 36 if (RESIDUES[batch["residue"][i, j]], k) in SYMMETRIC else 72
        position = (float(batch["chi"][i, j, k]) + 180) / 5 - 0.5
        low, share = int(position // 1), position % 1
        logs = torsions[i, j, k].log_softmax(0)
        total -= 0.5 * float((1 - share) * logs[low % bins] + share * logs[(low + 1) % bins])
        number += 1
    assert float(terms["torsions"]) == pytest.approx(total) and int(counts["torsions"]) == number > 30


@pytest.mark.parametrize("strategy", ["random", "block"])
def test_the_loss_of_a_batch_is_the_sum_over_its_samples(strategy: str) -> None:
    mine = recipe(masking_strategy=strategy, backbone_only=0.3)
    model, chains, numbers = network(mine), items(5), [3, 17, 4, 4021, 99]
    together = mine.loss(model, mine.collate(chains), keys(numbers)).terms
    weights = mine.term_counts(mine.collate(chains), keys(numbers))
    for name in ("fragments", "torsions"):
        alone = [
            mine.loss(model, mine.collate([c]), keys([i])).terms[name] for c, i in zip(chains, numbers, strict=True)
        ]
        torch.testing.assert_close(torch.stack(alone).sum(), together[name], rtol=1e-11, atol=0)
        counts = [mine.term_counts(mine.collate([c]), keys([i]))[name] for c, i in zip(chains, numbers, strict=True)]
        assert sum(counts) == weights[name]


@pytest.mark.slow
def test_the_objective_compiles_as_one_graph() -> None:
    mine = recipe(backbone_only=0.3, num_encoder_layers=1)
    model, batch, index = network(mine).train(), mine.collate(items(3)), torch.arange(3)
    objective = Objective(mine.loss, model, seed=5)
    per_sample = {"fragments": torch.tensor(9.0), "torsions": torch.tensor(4.0)}
    torch.compiler.reset()
    try:
        compiled = torch.compile(objective, fullgraph=True, backend="eager")
        total, _, _ = compiled(batch, index * 0, index, per_sample)
        total.backward()
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(total, objective(batch, index * 0, index, per_sample)[0])
    assert all(p.grad is not None for p in model.parameters())


def test_the_loss_is_finite_and_close_under_autocast() -> None:
    torch.set_default_dtype(torch.float32)
    mine = recipe()
    model = network(mine)
    batch = mine.collate([chain.item() for chain in peptides("train", 3)])
    exact = mine.loss(model, batch, keys([0, 1, 2])).total
    with torch.autocast("cpu", torch.bfloat16):
        rough = mine.loss(model, batch, keys([0, 1, 2])).total
    assert rough.dtype == torch.float32 and rough.item() == pytest.approx(exact.item(), rel=0.03)


def test_a_residue_is_known_by_its_fragments() -> None:
    for kind in range(20):
        logits = torch.zeros(1, 1, 5, len(TOKENS))
        for slot, token in enumerate(slot_table()[kind].tolist()):
            logits[0, 0, slot, token] = 30.0
        scores = residue_scores(logits)[0, 0]
        assert int(scores.argmax()) == kind and float(scores.exp().sum()) == pytest.approx(1)
        assert float(scores.exp()[kind]) > 0.99


def test_torsion_errors_are_whole_numbers_by_torsion_the_short_way_round() -> None:
    logits = torch.full((1, 1, 4, 72), -100.0)
    logits[..., 0] = 100.0  # −177.5 degrees
    chi = torch.tensor([[[172.5, -157.5, 0.0, 2.5]]])
    symmetric = torch.tensor([[[False, False, False, True]]])
    sums = torsion_counts(logits, chi, torch.tensor([[[True, True, False, True]]]), symmetric)
    assert {k: v.tolist() for k, v in sums.items()} == {  # type: ignore[union-attr]
        "torsion error": [10_000, 20_000, 0, 0],
        "torsion hits": [1, 1, 0, 1],
        "torsion count": [1, 1, 0, 1],
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask_ratio": 0.0},
        {"backbone_only": 1.5},
        {"hidden_dim": 30},
        {"num_heads": 0},
        {"val_share": 0.6, "test_share": 0.5},
        {"max_length": 4},
        {"num_encoder_layers": 0},
    ],
)
def test_wrong_options_are_refused_with_the_value(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values()))).replace(".", r"\.")):
        ProteinOptions(**wrong)


def test_a_small_model_is_made_of_the_same_parts() -> None:
    assert isinstance(network(), SideChains) and Size(32, 1, 1, 4).neighbours == 30
