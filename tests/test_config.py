"""Flags, files and presets are one thing; what is wrong in them is said."""

import dataclasses
from pathlib import Path

import pytest
import tiny
import yaml

from lockstep.batching import Batching
from lockstep.flags import ALIASES, Request, parse
from lockstep.registry import find, installed


def request(*flags: str) -> Request:
    return parse(tiny.Tiny, flags, "lockstep train tiny")


def plan(request: Request, dataset: int, world: int, resumed_global_batch: int | None = None) -> Batching:
    return Batching.plan(request.train.data, dataset, world, resumed_global_batch, request.smoke)


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return str(path)


def test_the_recipes_defaults_hold_until_something_is_said() -> None:
    assert request().train.optim.lr == 1e-2 and request().train.data.n_steps == 20
    assert request("--lr", "3e-4").train.optim.lr == 3e-4


@pytest.mark.parametrize("flags", [["--batch_size", "7"], ["--batch-size", "7"], ["--batch-size=7"], ["--batchsize=7"]])
def test_spellings_of_a_flag(flags: list[str]) -> None:
    assert request(*flags).train.data.batch_size == 7


def test_yes_and_no() -> None:
    assert request("--no_use_amp").train.hardware.precision == "fp32"
    assert request("--no-tensorboard").train.run.tensorboard is False
    assert request("--tensorboard").train.run.tensorboard is True


def test_the_command_line_wins_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    config = file(tmp_path, "lr: 1e-3\nbatch_size: 5\ntensorboard: true\ncompile: on\nema_decay: [0.9, 0.99]\n")
    got = request("--config", config, "--batch_size", "6", "--preset", "short")
    assert (got.train.optim.lr, got.train.data.batch_size, got.train.data.n_steps) == (1e-3, 6, 3)
    assert got.train.run.tensorboard and got.train.hardware.compile == "on"
    assert got.train.optim.ema_decay == (0.9, 0.99)
    assert request("--preset", "short", "--n_steps", "9").train.data.n_steps == 9


def test_a_written_config_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    first = request("--lr", "0.3", "--width", "9", "--ema_decay", "0.5", "--use_wandb", "--epochs", "4")
    first.write(tmp_path / "config.yaml")
    assert request("--config", str(tmp_path / "config.yaml")).train.run.use_wandb
    again = request("--config", str(tmp_path / "config.yaml")).flat()
    expected = first.flat()
    assert {k: v for k, v in again.items() if k != "config"} == {k: v for k, v in expected.items() if k != "config"}


def test_steps_and_epochs_exclude_each_other_where_they_stand_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--n_steps or --epochs, not both"):
        request("--n_steps", "5", "--epochs", "2")
    got = request("--epochs", "2").train.data
    assert (got.n_steps, got.epochs) == (None, 2)
    got = request("--config", file(tmp_path, "epochs: 3"), "--n_steps", "7").train.data
    assert (got.n_steps, got.epochs) == (7, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch_sise", "3"], "batch_size"),
        (["--batch_size", "many"], "batch_size"),
        (["--batch_size", "0"], "batch_size is at least 1, not 0"),
        (["--gradient_accumulation_steps", "-1"], "0 and 1 both mean none"),
        (["--schedule", "cosin"], "cosine"),
        (["--ema_decay", "1.5"], "between 0 and 1"),
        (["--nproc", "two"], "nproc"),
        (["--timeout", "0"], "more than 0"),
        (["--no_use_amp", "--precision", "bf16"], "no_use_amp means"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_flag_is_explained_with_status_2(flags: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        request(*flags)
    assert end.value.code == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", "").split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bach_size: 3", "settings.yaml: there is no setting 'bach_size'; did you mean 'batch_size'"),
        ("tensorboard: maybe", "true or false"),
        ("- 1\n- 2", "flag: value"),
        ("a: [", "not valid YAML"),
        ("lr: {a: 1}", "one value"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        request("--config", file(tmp_path, text))


def test_a_missing_file_and_an_unknown_preset_are_explained() -> None:
    with pytest.raises(ValueError, match="cannot read the config"):
        request("--config", "nowhere.yaml")
    with pytest.raises(ValueError, match="did you mean 'short'"):
        request("--preset", "shrt")


def test_other_ranks_stay_silent_about_a_wrong_flag(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        request("--batch_sise", "3")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "world", "expected"),
    [
        (["--batch_size", "8"], 4, (8, 1, 32)),
        (["--batch_size", "8", "--gradient_accumulation_steps", "3"], 2, (8, 3, 48)),
        (["--batch_size", "8", "--gradient_accumulation_steps", "0"], 2, (8, 1, 16)),
        (["--batch_size", "8", "--global_batch_size", "64"], 1, (8, 8, 64)),
        (["--batch_size", "8", "--global_batch_size", "64"], 3, (8, 3, 64)),
        (["--batch_size", "100", "--global_batch_size", "64"], 4, (16, 1, 64)),
        (["--batch_size", "1", "--global_batch_size", "3"], 2, (1, 2, 3)),
    ],
)
def test_the_global_batch(flags: list[str], world: int, expected: tuple[int, int, int]) -> None:
    sizes = plan(request(*flags), 997, world)
    assert (sizes.micro_batch, sizes.accumulation, sizes.global_batch) == expected


def test_epochs_become_steps_that_cover_them() -> None:
    assert plan(request("--epochs", "3", "--batch_size", "10"), 997, 1).n_steps == 300
    assert plan(request("--epochs", "1", "--batch_size", "10"), 1000, 1).n_steps == 100


@pytest.mark.parametrize(
    ("flags", "dataset", "world", "said"),
    [
        (["--batch_size", "64"], 50, 1, "50 samples, fewer than the global batch of 64"),
        (["--global_batch_size", "2"], 50, 4, "too small for 4 ranks"),
    ],
)
def test_sizes_that_cannot_be(flags: list[str], dataset: int, world: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(request(*flags), dataset, world)


def test_a_resumed_run_keeps_its_global_batch() -> None:
    sizes = plan(request("--batch_size", "8"), 997, 2, 64)
    assert (sizes.global_batch, sizes.accumulation) == (64, 4)
    with pytest.raises(ValueError, match="global batch of 64"):
        plan(request("--global_batch_size", "32"), 997, 2, 64)


def test_a_bomb_of_yaml_aliases_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["ema_decay: &a0 [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]"]
    lines += [f"x{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    for last in ("ema_decay: *a29", "seed: *a29"):
        with pytest.raises(ValueError, match=r"no setting 'x1'|list of single values|single values"):
            request("--config", file(tmp_path, "\n".join([*lines, last])))
    for key in ("ema_decay", "tensorboard", "preset", "resume", "ddp"):
        with pytest.raises(ValueError, match=f"{key} is a list of single values"):
            request("--config", file(tmp_path, f"{key}: [&a [0.5, 0.5], *a]"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: " + "[" * 5_000, "nested too deeply"),
        ("lr: " + "1" * 300_000, "has 300,004 characters; a file of settings has at most 200,000"),
        ("lr: &a [*a]", "not valid YAML"),
        ("? [a]\n: 1", "not valid YAML"),
        ("preset: [a, b]", "there is no preset 'a b'"),
        ("lr: \udcff", "is not a text file"),
    ],
)
def test_a_hostile_file_is_refused_in_no_time(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=said):
        request("--config", str(path))


def test_an_alias_of_out_in_a_file_says_which_run_is_resumed(tmp_path: Path) -> None:
    asked: list[str | None] = []
    config = file(tmp_path, "resume: auto\nsave_dir: here\n")
    parse(tiny.Tiny, ["--config", config], "test", lambda _, out, __: asked.append(out))
    assert asked == ["here"]


def test_an_option_that_was_removed_is_an_error_but_in_the_config_of_an_old_run(tmp_path: Path) -> None:
    vision = find("vision")
    (tmp_path / "config.yaml").write_text("batch_size: 5\ndata_form: auto\n")
    with pytest.raises(ValueError, match="there is no setting 'data_form'"):
        parse(vision, ["--config", str(tmp_path / "config.yaml")], "test")
    (tmp_path / "receipt.json").write_text("{}")
    assert parse(vision, ["--config", str(tmp_path / "config.yaml")], "test").train.data.batch_size == 5


def test_smoke_caps_steps_and_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SMOKE", "3")
    got = request("--n_steps", "100", "--global_batch_size", "512")
    sizes = plan(got, 997, 2)
    assert (sizes.n_steps, sizes.micro_batch, sizes.global_batch, got.smoke) == (3, 2, 4, 3)
    monkeypatch.setenv("LOCKSTEP_SMOKE", "some")
    with pytest.raises(ValueError, match="number of steps"):
        request()


def test_every_flag_is_documented_and_unique() -> None:
    import ast
    import inspect
    from itertools import pairwise

    from lockstep import config

    names = []
    for group in (config.Data, config.Optim, config.Hardware, config.Run):
        body = ast.parse(inspect.getsource(group)).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign):
                names.append(field.target.id)  # type: ignore[union-attr]
                assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant), names[-1]
    assert len(names) == len(set(names)) > 40
    assert set(ALIASES.values()) <= set(names) and not set(ALIASES) & set(names)


def test_presets_and_defaults_of_all_recipes_parse() -> None:
    for name in installed():
        recipe = find(name)
        for preset in recipe.presets:
            parse(recipe, ["--preset", preset], "test")
        assert yaml.safe_dump(dict(recipe.defaults))


def test_an_empty_text_is_not_nothing(tmp_path: Path) -> None:
    """As in the config.yaml of a run whose recipe has an option that is empty by default."""

    @dataclasses.dataclass
    class Options(tiny.Options):
        prefix: str = ""
        folder: str | None = "here"

    recipe = type("Prefixed", (tiny.Tiny,), {"Options": Options})
    path = file(tmp_path, "prefix: ''\nfolder:\nout:\n")
    found = parse(recipe, ["--config", path], "lockstep train tiny")
    assert (found.options.prefix, found.options.folder, found.train.run.out) == ("", None, None)
