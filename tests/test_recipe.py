"""How recipes are found."""

from pathlib import Path

import pytest
import tiny

from lockstep.registry import find, installed, register_script, spec_of


def test_installed_recipes_are_found_by_name() -> None:
    assert "dit" in installed() and find("dit").name == "dit"


def test_a_recipe_in_a_file_is_found(tmp_path: Path) -> None:
    file = Path(tiny.__file__)
    assert find(f"{file}:Labelled").__name__ == "Labelled"
    alone = tmp_path / "alone.py"
    alone.write_text("from lockstep import Recipe\n\n\nclass Mine(Recipe):\n    pass\n")
    assert spec_of(find(str(alone))) == f"{alone}:Mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dti", "did you mean 'dit'"),
        ("nowhere.py:Mine", "no file nowhere.py"),
        (f"{tiny.__file__}", "say which recipe"),
        (f"{tiny.__file__}:Missing", "say which recipe"),
    ],
)
def test_what_is_not_found_is_explained(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find(name)


def test_a_class_that_a_script_trains_is_found_again(tmp_path: Path) -> None:
    from lockstep.recipes.dit import DiTRecipe

    assert spec_of(register_script(DiTRecipe, tmp_path / "train.py")) == "dit"
    spec = spec_of(register_script(tiny.Labelled, tmp_path / "train.py"))
    assert find(spec).__name__ == "Labelled"
