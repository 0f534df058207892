"""`lockstep audit -- SCRIPT [flags]`: find the silent distributed bugs of any training script."""

from ..audit.command import audit


def run(words: list[str]) -> int:
    return audit(words)
