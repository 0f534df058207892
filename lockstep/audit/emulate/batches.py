"""Another batch size without a flag for it: each DataLoader gets its own, times a factor."""

from torch.utils.data import DataLoader

from ..patch import Arguments, Patches


def scale(patches: Patches, factor: float) -> None:
    """Multiply the batch size of each DataLoader that is made from now on; one without a batch size stays."""

    def edit(arguments: Arguments) -> None:
        size = arguments.get("batch_size", 1)
        if isinstance(size, int) and arguments.get("batch_sampler") is None:
            arguments["batch_size"] = max(1, round(size * factor))

    patches.edit_arguments(DataLoader, "__init__", edit)
