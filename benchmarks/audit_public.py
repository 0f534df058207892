"""python benchmarks/audit_public.py: the audit's score on public training scripts, and how to run them again.

audit_public.toml lists repository, commit, file, how to run it, and what is wrong with it by reading. It holds no code
of others and nothing is fetched: clone a repository at its commit into FOLDER/OWNER/NAME and give `--run FOLDER`. Those
that are there are audited, compared with what is expected, and their results written down (`--write`), with the page
audit_public.md.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.audit.catalog import KINDS

HERE = Path(__file__).parent
TABLE, PAGE = HERE / "audit_public.toml", HERE / "audit_public.md"
_HEAD = """# Public training scripts, what is wrong with each by reading, and what the audit found when it was last run.
# `run` is what follows `lockstep audit` in the folder of the file. `needs` is why it was not run.
"""
_SECONDS = 900


@dataclass
class Script:
    """A public script: where it is, what is expected, what was found."""

    repository: str
    commit: str
    file: str
    run: str
    expected: list[str]
    why: str
    last: list[str] | None = None
    """Names of what was found; None: it was not run."""
    needs: str = ""
    changed: str = ""
    """How the script that was run differs from the file."""

    @property
    def name(self) -> str:
        return f"{self.repository}/{self.file}"

    def place(self, folder: Path) -> Path:
        return folder / self.repository / self.file


@dataclass
class Score:
    """Of findings of one severity, or of all."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        found, there = self.right + len(self.wrong), self.right + len(self.missed)
        return f"{self.right} of {found} found are right; {self.right} of {there} that are there were found"


def scripts(file: Path = TABLE) -> list[Script]:
    """Return the table."""
    return [Script(**entry) for entry in tomllib.loads(file.read_text())["script"]]


def score(run: Iterable[Script], severity: str | None = None) -> Score:
    """Return the score over scripts that were run; of all severities, or of one."""
    total = Score()
    for script in run:
        both = (script.expected, script.last or [])
        expected, found = ({n for n in names if severity in (None, KINDS[n].severity)} for names in both)
        total.right += len(expected & found)
        total.wrong += [f"{script.name}: {name}" for name in sorted(found - expected)]
        total.missed += [f"{script.name}: {name}" for name in sorted(expected - found)]
    return total


def audited(script: Script, folder: Path) -> list[str] | None:
    """Return the names of what the audit finds, None if it could not begin."""
    place = script.place(folder)
    with tempfile.TemporaryDirectory() as results:
        report = Path(results) / "audit.json"
        words = ["--device", "cpu", "--json", str(report), *shlex.split(script.run)]
        command = [sys.executable, "-m", "lockstep", "audit", *words]
        done = subprocess.run(command, cwd=place.parent, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if not report.exists():
            print(f"{script.name}: {(done.stderr or done.stdout).strip()[-300:]}")
            return None
        return [finding["name"] for finding in json.loads(report.read_text())["findings"]]


def as_toml(table: list[Script]) -> str:
    """Return the table as it is stored."""
    lines = [_HEAD]
    for script in table:
        lines.append("[[script]]")
        values = {name: value for name, value in vars(script).items() if value not in (None, "")}
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def as_page(table: list[Script]) -> str:
    """Return the table as Markdown, with the score of those that were run."""
    run = [script for script in table if script.last is not None]
    lines = ["# The audit on public scripts", ""]
    lines.append(
        f"{len(table)} scripts that nobody of this project wrote, read at a named commit; {len(run)} of them were run "
        "here (CPU, no network), the others need what the last column says. Only those that were run count. `python "
        "benchmarks/audit_public.py` prints the score; `--run FOLDER --write` runs what is in a folder and renews this "
        "page. It was written by the people who wrote the audit, who may have read past a bug that the audit misses "
        "too. What is expected was read before the runs; for five scripts a finding was added or renamed after them."
    )
    lines += ["", "| | score |", "|---|---|"]
    for severity in (None, "error", "warning", "note"):
        lines.append(f"| {severity or 'all findings'} | {score(run, severity)} |")
    clean = [script for script in run if not script.expected]
    silent = sum(not script.last for script in clean)
    lines.append(f"| scripts with nothing wrong | {silent} of {len(clean)} without a finding |")
    total = score(run)
    lines += ["", "Missed:", *(f"- {entry}" for entry in total.missed or ["nothing"])]
    lines += ["", "Wrong:", *(f"- {entry}" for entry in total.wrong or ["nothing"]), ""]
    lines += ["| script | commit | expected | why | last result |", "|---|---|---|---|---|"]
    lines += [_row(script) for script in table]
    return "\n".join(lines) + "\n"


def _row(script: Script) -> str:
    expected = ", ".join(f"`{name}`" for name in script.expected) or "nothing"
    last = f"not run here: needs {script.needs}"
    if script.last is not None:
        last = ", ".join(f"`{name}`" for name in script.last) or "nothing found"
        last += f" (run with: {script.changed})" if script.changed else ""
    command = f"`lockstep audit {script.run}`"
    return f"| {script.name}<br>{command} | {script.commit[:10]} | {expected} | {script.why} | {last} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="the audit's score on public training scripts")
    parser.add_argument("words", nargs="*", help="scripts whose name holds one of these; all, if there are none")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="audit those that are in FOLDER/OWNER/NAME")
    parser.add_argument("--write", action="store_true", help="write the results into audit_public.toml and .md")
    asked = parser.parse_args()
    table = scripts()
    for script in table:
        chosen = not asked.words or any(word in script.name for word in asked.words)
        if asked.run and chosen and script.place(asked.run).is_file():
            script.last = audited(script, asked.run.resolve())
            found = "could not be audited" if script.last is None else ", ".join(script.last) or "nothing"
            print(f"{script.name}: expected {', '.join(script.expected) or 'nothing'}; found {found}", flush=True)
    run = [script for script in table if script.last is not None]
    for severity in ("error", "warning", "note"):
        print(f"{severity:8} {score(run, severity)}")
    print(f"{len(run)} of {len(table)} scripts were run")
    if asked.write:
        TABLE.write_text(as_toml(table))
        PAGE.write_text(as_page(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
