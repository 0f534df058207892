"""`lockstep plan`: what is counted, what is predicted from it, and what is printed."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from lockstep import Loss, Rng
from lockstep.commands import plan as command
from lockstep.config import TrainConfig
from lockstep.flags import Request, parse
from lockstep.options import PlanFlags
from lockstep.plan import measure as measuring
from lockstep.plan.hardware import GIB, GPUS
from lockstep.plan.measure import Measured, Work, measure
from lockstep.plan.memory import largest_micro_batch, memory_of
from lockstep.plan.predict import Machines, predict
from lockstep.plan.scaling import scale
from lockstep.registry import find

PAGE = (Path(__file__).parents[1] / "docs" / "plan.md").read_text()
TINY = f"{tiny.__file__}:Tiny"


def request(recipe: str | type[Any] = "", *flags: str) -> Request:
    return parse(find(recipe or TINY) if isinstance(recipe, str) else recipe, list(flags), "test")


class LooksAtValues(tiny.Tiny):
    """Its loss depends on a value, which a fake tensor has not."""

    name = "looks"

    def loss(self, model: nn.Module, batch: dict[str, Tensor], rng: Rng) -> Loss:
        return super().loss(model, {k: v[v[:, 0] > -1e9] for k, v in batch.items()}, rng)


def test_flops_of_a_small_network_are_those_counted_by_hand() -> None:
    """6 → 16 → 16 → 4: products forward, gradients of all weights, and of all inputs but the first."""
    forward = 2 * (6 * 16 + 16 * 16 + 16 * 4)
    by_hand = 2 * forward + 2 * (16 * 16 + 16 * 4)
    found = measure(request())
    for samples in (1, 4, 64):
        assert found.at(samples).flops == pytest.approx(samples * by_hand)
    assert found.parameters == found.trained == 6 * 16 + 16 + 16 * 16 + 16 + 16 * 4 + 4
    assert found.weights == found.gradients == 4 * found.parameters
    assert found.optimizer_state == pytest.approx(8 * found.parameters)  # two moments
    assert found.dataset == 997 and not found.real


@pytest.mark.parametrize(
    ("flags", "state"), [(["--optimizer", "sgd"], 4), (["--optimizer", "sgd", "--momentum", "0"], 0)]
)
def test_state_is_that_of_the_optimizer(flags: list[str], state: int) -> None:
    found = measure(request("", *flags, "--ema_decay", "0.9", "0.99"))
    assert found.optimizer_state == state * found.parameters
    assert found.averages == 2 * 4 * found.parameters


def test_fake_tensors_count_what_real_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = measure(request("", "--precision", "bf16"))
    real = measure(request(LooksAtValues, "--precision", "bf16"))
    assert "aten" in real.real and not fake.real
    assert real.at(8).flops == fake.at(8).flops
    assert real.parameters == fake.parameters and real.optimizer_state == fake.optimizer_state
    assert real.at(8).memory == pytest.approx(fake.at(8).memory, rel=0.5)  # and the selected rows


def test_a_data_set_without_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="training set is empty"):
        measure(request("", "--size", "0"))


def measured(parameters: float = 1e8, per_sample: float = 100 * 2**20, batch_norm: bool = False) -> Measured:
    """A model of 400 MB whose activations take 100 MiB per sample."""
    works = [Work(n * 1e12, n * 1e8, n * 1e9, 1000, n * per_sample) for n in (4, 8)]
    size, count = 4 * parameters, int(parameters)
    return Measured(
        count, count, size, size, size / 10, 2 * size, size, batch_norm, 100_000, (4, 8), (works[0], works[1])
    )


def test_the_largest_micro_batch_fits_and_one_more_sample_does_not() -> None:
    for shard, world in (("none", 1), ("optimizer", 8), ("full", 8)):
        largest = largest_micro_batch(measured(), 24 * GIB, shard, world)
        assert memory_of(measured(), largest, shard, world).total <= 24 * GIB
        assert memory_of(measured(), largest + 1, shard, world).total > 24 * GIB
    assert largest_micro_batch(measured(1e10), 24 * GIB) == 0


def test_sharding_divides_what_it_says() -> None:
    ddp, optimizer, full = (memory_of(measured(), 8, shard, 8) for shard in ("none", "optimizer", "full"))
    assert (optimizer.weights, optimizer.gradients) == (ddp.weights, ddp.gradients)
    assert optimizer.optimizer == ddp.optimizer / 8 and optimizer.averages == ddp.averages / 8
    assert full.gradients == ddp.gradients / 8
    assert full.weights == ddp.weights / 8 + 2 * ddp.weights / 10  # and two blocks, whole
    assert ddp.activations == optimizer.activations == full.activations


def test_the_all_reduce_is_hidden_only_as_far_as_the_backward_pass_lasts() -> None:
    def step(gpu: str, gpus: int, batch: int = 8, nodes: int = 1):  # type: ignore[no-untyped-def]
        return predict(measured(), Machines(GPUS[gpu], gpus, nodes), batch, 1, "bf16", True)

    assert step("h100", 1).all_reduce == step("h100", 1).exposed == 0
    assert step("h100", 8).all_reduce == pytest.approx(2 * 7 / 8 * 4e8 / 360e9 + 14 * 20e-6)
    assert step("4090", 8).exposed > step("h100", 8).exposed
    assert step("4090", 8, batch=64).exposed < step("4090", 8, batch=8).exposed
    assert step("h100", 1, nodes=2).all_reduce < step("4090", 1, nodes=2).all_reduce  # over the network
    assert step("4090", 8, nodes=2).bound == "all-reduce"
    for one in (step("4090", 8), step("h100", 8)):
        assert one.total == pytest.approx(one.computation + one.exposed) and one.exposed <= one.all_reduce


def config(*flags: str) -> TrainConfig:
    return request("", "--n_steps", "1000", *flags).train


def machines(*gpus: int) -> list[Machines]:
    return [Machines(GPUS["h100"], count) for count in gpus]


def test_learning_rates_are_those_of_the_guides() -> None:
    """1 GPU: 1e-4 at batch 4; 8 GPUs: 8e-4, or 1e-4 × √8 ≈ 2.83e-4. And the flags that train so give the same."""
    flags = ["--batch_size", "4", "--lr", "1e-4"]
    one, eight = scale(measured(), config(*flags), machines(1, 8))
    assert (one.batching.global_batch, eight.batching.global_batch) == (4, 32)
    assert (eight.lr, eight.lr_linear, eight.lr_sqrt) == pytest.approx((1e-4, 8e-4, 2.83e-4), rel=1e-3)
    for rule, rate in (("linear", eight.lr_linear), ("sqrt", eight.lr_sqrt)):
        scaled = scale(measured(), config(*flags, "--lr_scaling", rule, "--base_batch_size", "4"), machines(1, 8))
        assert scaled[1].lr == pytest.approx(rate) and scaled[0].lr == pytest.approx(1e-4)


def test_speed_up_compares_samples_per_second_and_the_length_of_a_run_follows_from_it() -> None:
    runs = scale(measured(), config("--batch_size", "8"), machines(1, 2, 8))
    assert runs[0].speed_up == pytest.approx(1)
    assert 1 < runs[1].speed_up <= 2 < runs[2].speed_up <= 8
    for run in runs:
        assert run.days == pytest.approx(1000 * 8 / run.samples_per_second / 86_400)
        assert run.speed_up == pytest.approx(run.samples_per_second / runs[0].samples_per_second)
    fixed = scale(measured(), config("--batch_size", "8", "--global_batch_size", "32"), machines(1, 4))
    assert [(r.batching.global_batch, r.batching.accumulation) for r in fixed] == [(32, 4), (32, 1)]
    assert fixed[0].lr == fixed[1].lr == fixed[1].lr_linear


def test_a_model_whose_batch_norm_is_synchronised_is_not_compiled() -> None:
    one, two = scale(measured(batch_norm=True), config(), machines(1, 2))
    assert one.compiled and not two.compiled
    assert all(run.compiled for run in scale(measured(batch_norm=True), config("--sync_bn", "off"), machines(1, 2)))


def test_a_set_too_small_for_many_gpus_is_an_error_that_names_their_number() -> None:
    with pytest.raises(ValueError, match=r"on 1000 GPU\(s\): the training set has 100000 samples, fewer than"):
        scale(measured(), config("--batch_size", "500"), machines(1, 1000))


CHECKED = {
    "DiT-S/2, 128 images, compiled": ("dit", 128, True),
    "DiT-S/2, 128 images, eager (a plain script)": ("dit", 128, False),
    "JiT-B/4, 256 images, compiled": ("jit", 256, True),
    "`protein`, 32 chains, compiled": ("protein", 32, True),
    "`vision` ResNet-18, 512 images of 32 px, compiled": ("vision", 512, True),
}


@cache
def measured_once(recipe: str) -> Measured:
    return measure(request(recipe))


@pytest.mark.slow
@pytest.mark.parametrize("row", CHECKED)
def test_the_page_has_the_predictions_of_the_steps_that_were_measured(row: str) -> None:
    recipe, samples, compiled = CHECKED[row]
    found = measured_once(recipe)
    said = re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \| ([\d.]+) \| ([+−]?\d+) % \|$", PAGE, re.M)
    assert said
    was, predicted, error = float(said[1]), float(said[2]), float(said[3].replace("−", "-"))
    step = predict(found, Machines(GPUS["h200"]), samples, 1, "bf16", compiled)
    assert 1e3 * step.total == pytest.approx(predicted, rel=0.02)
    assert 100 * (predicted / was - 1) == pytest.approx(error, abs=1)
    if step.bound == "launch" and compiled:
        assert step.total < was / 1e3  # called a lower bound


def test_the_page_has_the_figures_of_each_gpu() -> None:
    for name, gpu in GPUS.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        for figure in (gpu.half / 1e12, gpu.memory / GIB, gpu.bandwidth / 1e9, gpu.link / 1e9, gpu.network * 8 / 1e9):
            assert f"{figure:,g} " in row.replace("1008", "1,008"), (name, figure)


def test_the_command_prints_a_plan_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    words = [TINY, "--gpu", "4090", "--gpus", "1,2", "--batch_size", "16", "--plot", str(picture)]
    assert command.run(words) == 0
    shown = capsys.readouterr().out
    assert "a prediction" in shown and "lr linear" in shown and "largest batch_size" in shown
    assert max(map(len, shown.rstrip().splitlines()[:-1])) <= 80
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert command.run([*words[:-2], "--json", "--nodes", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"] and [run["world"] for run in found["runs"]] == [2, 4]
    assert [run["global_batch"] for run in found["runs"]] == [32, 64]
    assert found["memory"]["none"]["total"] > found["memory"]["full"]["total"]


def test_a_batch_that_fits_only_in_shards_is_accepted_with_them() -> None:
    runs = scale(measured(2e9), config("--batch_size", "8"), machines(8))
    notes = [
        command.notes(command.Plan("x", GPUS["4090"], "bf16", measured(2e9), runs, shard)) for shard in ("none", "full")
    ]
    assert ["not even one sample fits" in " ".join(each) for each in notes] == [True, False]


def test_a_batch_that_does_not_fit_comes_with_flags_that_do() -> None:
    plan = command.Plan(
        "x", GPUS["2080ti"], "fp16", measured(), scale(measured(), config("--batch_size", "256"), machines(1))
    )
    (note,) = [note for note in command.notes(plan) if "does not fit" in note]
    flags = re.findall(r"--batch_size (\d+) --global_batch_size (\d+)", note)
    assert flags == [(str(largest_micro_batch(measured(), 11 * GIB)), "256")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to plan"),
        (["--gpus", "2"], "say what to plan"),
        ([TINY, "--precision", "fp64"], "not fp64"),
    ],
)
def test_what_cannot_be_planned_is_an_error(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.run(words)


def test_flags_have_rules() -> None:
    for wrong in ({"gpus": "1,x"}, {"gpus": "0"}, {"nodes": 0}, {"network": 0.0}):
        with pytest.raises(ValueError, match="not"):
            PlanFlags(**wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_correction_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="none is visible"):
        command.run([TINY, "--measure"])


def test_the_largest_block_is_that_of_a_stack_or_what_is_in_none() -> None:
    def model(head: int) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(5)]
        return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(8, head, bias=False)})

    assert measuring._largest_block(model(2)) == 8 * 8 * 4
    assert measuring._largest_block(model(99)) == 8 * 99 * 4


def test_recomputed_activations_take_less_memory_and_more_flops() -> None:
    flags = ["--model", "DiT-Nano/4", "--img_size", "16"]
    kept, again = (
        measure(request("dit", *flags, "--activation_checkpointing", what)).at(32) for what in ("none", "blocks")
    )
    assert again.memory < 0.7 * kept.memory
    assert 1.2 * kept.flops < again.flops < 1.4 * kept.flops  # a third forward pass, of the blocks
