"""`lockstep report RUN [RUN ...]`: one HTML page about a run, or several side by side."""

from pathlib import Path

import tyro

from ..options import ReportFlags
from ..report.html import write_page


def run(words: list[str]) -> int:
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    folders = [Path(word) for word in words[:count]]
    if not folders:
        raise ValueError("say which run: lockstep report RUN [RUN ...]")
    flags = tyro.cli(ReportFlags, args=words[count:], prog="lockstep report RUN", use_underscores=True)
    path = Path(flags.out) if flags.out else folders[0] / "report.html"
    try:
        write_page(folders, path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    print(path)
    return 0
