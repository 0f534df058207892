"""A recipe's model: real, or on the meta device with its values on rank 0 alone."""

from collections.abc import Callable

import torch
from torch import nn

from ..distributed import World
from ..recipe import Pretrained, Recipe


def make_model(recipe: Recipe, new_run: bool, note: Callable[[str], None]) -> nn.Module:
    """Return the recipe's model with its initial or, in a new run, pretrained weights; on the CPU."""
    model = recipe.model()
    if isinstance(recipe, Pretrained) and new_run and (text := recipe.load_pretrained(model)):
        note(text)
    return model


def make_meta_model(
    recipe: Recipe, new_run: bool, note: Callable[[str], None], world: World
) -> tuple[nn.Module, nn.Module | None]:
    """Return the model without memory for its tensors, and on rank 0 another one with all of them, as `make_model`."""
    source = make_model(recipe, new_run, note) if world.is_main else None
    try:
        with torch.device("meta"):
            model = recipe.model()
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"--shard full makes the model on the meta device first, where tensors have no values, and model() needs "
            f"some ({error}); make numbers with Python or NumPy there"
        ) from None
    named = dict(model.named_parameters())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in named:
            twin = next(other for other, found in named.items() if found is parameter)
            raise ValueError(f"--shard full cannot share {name} with {twin} in a model; use --shard optimizer")
    return model, source
