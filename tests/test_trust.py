"""`sample`, `test` and `predict` execute a recipe file only if the user has trained with it, or names it."""

import json
import re
import shutil
from pathlib import Path

import pytest
from engine import train

from lockstep import cli, trust
from lockstep.commands import train as train_command
from lockstep.commands import trained
from lockstep.distributed import World
from lockstep.receipt import Receipt

CODE = """
from pathlib import Path
import tiny
Path("executed").touch()

class Mine(tiny.Generating):
    pass
"""


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")


@pytest.fixture
def foreign() -> Path:
    """A run that somebody else has made, with the recipe in its folder."""
    train(World(), "Generating", ["--n_steps", "1", "--out", "run"])
    Path("run/mine.py").write_text(CODE)
    name_recipe(f"{Path('run/mine.py').resolve()}:Mine")
    return Path("run")


def name_recipe(spec: object) -> None:
    receipt = Path("run/receipt.json")
    receipt.write_text(json.dumps({**json.loads(receipt.read_text()), "spec": spec}))


def refused(*words: str) -> str:
    """What the command line says when it refuses a run."""
    with pytest.raises(ValueError) as error:
        cli._dispatch([*words, "--device", "cpu"])
    assert not Path("executed").exists()
    return str(error.value)


@pytest.mark.parametrize("command", [["sample", "run"], ["test", "run"], ["predict", "run", "."]])
def test_a_foreign_run_is_not_executed_and_the_error_names_file_and_flag(foreign: Path, command: list[str]) -> None:
    said = refused(*command)
    spec = f"{Path('run/mine.py').resolve()}:Mine"
    assert f"was trained with {spec}, a file that you have not trained with" in said and f"--recipe {spec}" in said


@pytest.mark.parametrize("spec", ["run/mine.py:Mine", "./run/../run/mine.py", "run/mine.pyw/../mine.py"])
def test_no_spelling_of_a_path_helps_a_foreign_run(foreign: Path, spec: str) -> None:
    name_recipe(spec)
    assert "--recipe" in refused("sample", "run")


def test_the_same_file_beside_the_users_own_is_not_trusted(foreign: Path) -> None:
    trust.record(Path("mine.py"))
    assert "--recipe" in refused("sample", "run")


def test_who_names_the_file_trusts_it(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = re.search(r"--recipe (\S+)$", refused("sample", "run")).group(1)  # type: ignore[union-attr]
    for given in ([f"--recipe={recipe}"], ["--recipe", "run/mine.py"]):
        assert cli._dispatch(["sample", "run", "--n", "2", "--device", "cpu", *given]) == 0
    assert Path("executed").exists() and "run/samples/step-00000001" in capsys.readouterr().out
    Path("executed").unlink()
    assert "--recipe" in refused("sample", "run"), "naming a file once trusts it once"


def test_a_file_that_was_trained_with_needs_no_flag() -> None:
    Path("mine.py").write_text(CODE)
    assert cli._dispatch(["train", "mine.py:Mine", "--n_steps", "1", "--device", "cpu", "--out", "run"]) == 0
    Path("mine.py").write_text(CODE + "# edited\n")
    assert cli._dispatch(["sample", "run", "--n", "2", "--device", "cpu"]) == 0
    shutil.move("mine.py", "moved.py")
    Path("executed").unlink()
    assert "there is no such file; say where it is: --recipe" in refused("sample", "run")
    assert cli._dispatch(["sample", "run", "--n", "2", "--device", "cpu", "--recipe", "moved.py"]) == 0


def test_a_run_of_an_installed_recipe_needs_no_flag(foreign: Path) -> None:
    name_recipe("vision")
    assert trained.recorded_recipe(Path("run")) == "vision"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"spec": ""}'])
def test_a_receipt_that_names_no_recipe_is_no_stack_trace(foreign: Path, content: str) -> None:
    Path("run/receipt.json").write_text(content)
    assert "names no recipe; say which it is: --recipe" in refused("sample", "run")


def test_training_goes_on_where_nothing_can_be_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file, no folder")
    Receipt({"spec": "mine.py:Mine"}, [], []).write(tmp_path / "receipt.json")
    assert not trust.is_trusted(Path("mine.py"))
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "state"))
    trust.record(Path("mine.py"))
    assert not trust.is_trusted(Path("mine.py"))


def test_the_list_holds_each_file_once_and_any_name(tmp_path: Path) -> None:
    names = ["a.py", "b c.py", "ü\udcff.py", "two\nlines.py"]
    for name in names * 2:
        trust.record(Path(name))
    assert [trust.is_trusted(Path(name)) for name in names] == [True, True, True, False]
    assert len((tmp_path / "state/lockstep/recipe_files").read_bytes().splitlines()) == 3


def test_train_resume_needs_no_recipe_unless_its_file_is_unknown(foreign: Path) -> None:
    name_recipe("vision")
    assert train_command._resumed_recipe(["--nproc", "2", "--resume=run"]) == "vision"
    name_recipe(f"{Path('other.py').resolve()}:Other")
    Path("other.py").write_text("")
    with pytest.raises(ValueError, match=r"if you trust it: lockstep train .*other.py:Other --resume run"):
        train_command._resumed_recipe(["--resume", "run"])
    for words, remedy in (([], "lockstep train --resume RUN"), (["--resume", "latest"], "RECIPE --resume latest")):
        with pytest.raises(ValueError, match=remedy):
            train_command._resumed_recipe(words)
