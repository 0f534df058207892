"""Several optimizers that take turns: whose step it is, and which parameters its loss is differentiated by."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from .optim import Update
from .recipe import Alternates, Recipe


class Turns:
    """Gives each step to the optimizer that the recipe names; only its parameters then require gradients."""

    def __init__(self, recipe: Alternates, model: nn.Module, update: Update):
        self.recipe, self.update = recipe, update
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._own = {name: set(update.parameters_of(name)) for name in update.optimizers}

    def start(self, step: int) -> str:
        """Give the turn to the optimizer of a step, and return its name."""
        name = self.recipe.turn_of(step)
        if name not in self._own:
            raise ValueError(
                f"turn_of({step}) returned {name!r}; it returns a name in optimizers(): {', '.join(self._own)}"
            )
        if name != self.recipe.turn:
            self._give(name)
        return name

    def each(self) -> Iterator[str]:
        """Give the turn to one after the other, and to nobody at the end."""
        for name in self._own:
            self._give(name)
            yield name
        self.end()

    def end(self) -> None:
        """Let all parameters require gradients again that did at the beginning."""
        self.recipe.turn = ""
        for parameter in self.trainable:
            parameter.requires_grad_(True)

    def _give(self, name: str) -> None:
        self.recipe.turn, own = name, self._own[name]
        self.update.use(name)
        for parameter in self.trainable:
            parameter.requires_grad_(parameter in own)
            parameter.grad = None


def check_optimizers(recipe: Recipe, returned: object, model: nn.Module) -> Mapping[str, torch.optim.Optimizer]:
    """Return what a recipe's optimizers() returned; a ValueError that shows the right form if it is none of it."""
    form = 'return {"g": torch.optim.AdamW(model.g.parameters()), "d": torch.optim.AdamW(model.d.parameters())}'
    if type(recipe).optimizer is not Recipe.optimizer:
        raise ValueError("a recipe that Alternates returns its optimizers from optimizers(), not from optimizer()")
    if not isinstance(returned, Mapping) or not returned:
        raise ValueError(f"optimizers() returned a {type(returned).__name__}, not a dict of optimizers: {form}")
    trained = set(model.parameters())
    for name, optimizer in returned.items():
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizers() has a {type(optimizer).__name__} under {name!r}, not an optimizer: {form}")
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"the names in optimizers() are words such as d and g, not {name!r}")
        if any(name.startswith(f"{other}_") for other in returned):
            raise ValueError(f"an optimizer cannot be called {name!r} beside another whose name it begins with")
        if any(parameter not in trained for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(f"the optimizer {name} has a parameter that is not in model(): build it from the model")
    return returned
