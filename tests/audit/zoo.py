"""The zoo: small scripts with one silent bug each, and scripts without.

`python tests/audit/zoo.py [words]` audits all, or those whose path holds one of the words, and prints the table. With
`--device cuda` on one GPU, its ranks over NCCL.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import environment, zygote

ZOO = Path(__file__).parent / "zoo"
_LONGEST = 500
"""Seconds after which an audit is given up."""
SCRIPTS = sorted(p for p in ZOO.glob("*/*.py") if p.name.startswith(("bug_", "ok_")))


def expected(script: Path) -> tuple[set[str], set[str]]:
    """What must be found, and what may be found beside it: the first lines of the script."""
    words = {}
    for key in ("finds", "also"):
        line = re.search(rf"^# {key}: (.+)$", script.read_text(), re.M)
        words[key] = {w.strip() for w in line[1].split(",")} - {"nothing"} if line else set()
    return words["finds"], words["also"]


def found(script: Path, device: str = "cpu") -> list[str]:
    """The names of the audit's findings, each script in a folder of its own. A line `# says: words` in a script names
    words that a finding must hold."""
    hangs = expected(script)[0] & {"collective-mismatch", "uneven-steps", "hangs"}
    patience = (4 if hangs else 30) if device == "cpu" else 15
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        names = audited([str(script)], folder, device, patience)
        report = Path(folder) / "audit.json"
        texts = (
            [f["what"] + " ".join(f["evidence"]) for f in json.loads(report.read_text())["findings"]] if names else []
        )
    said = re.findall(r"^# says: (.+)$", script.read_text(), re.M)
    return names + [f"(nothing says {words!r})" for words in said if not any(words in text for text in texts)]


def audited(words: list[str], folder: str, device: str = "cpu", patience: float = 30, **variables: str) -> list[str]:
    """The names of what the audit finds in a script that runs in `folder`."""
    flags = ["--steps", "0", "--patience", str(patience), "--device", device, "--json", "audit.json"]
    there = environment(device == "cuda", WANDB_MODE="offline", **variables)  # the zygote is prepared for CPUs only
    if device == "cuda":
        del there["CUDA_VISIBLE_DEVICES"]
    with suppress(subprocess.TimeoutExpired):
        command = ["lockstep", "audit", *flags, "--", *words]
        done = subprocess.run(command, cwd=folder, env=there, capture_output=True, timeout=_LONGEST, check=False)
        if done.returncode not in (0, 1):
            return ["(the audit itself failed)"]
        verdict = json.loads((Path(folder) / "audit.json").read_text())
        names = [finding["name"] for finding in verdict["findings"]]
        return names if names or any(rank["steps"] for rank in verdict["ranks"]) else ["(no steps)"]
    return ["(no answer in time)"]


def main() -> int:
    parser = argparse.ArgumentParser(description="what the audit finds in scripts with bugs and without")
    parser.add_argument("words", nargs="*", help="scripts whose path holds one of these; all, if there are none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time")
    asked = parser.parse_args()
    chosen = [s for s in SCRIPTS if not asked.words or any(w in str(s) for w in asked.words)]
    with zygote(), ThreadPoolExecutor(asked.jobs) as pool:
        results = dict(zip(chosen, pool.map(partial(found, device=asked.device), chosen), strict=True))
    detected = missed = silent = alarms = 0
    for script, names in results.items():
        must, may = expected(script)
        right = must <= set(names) <= must | may
        detected += bool(must) and must <= set(names)
        missed += bool(must) and not must <= set(names)
        silent += not must and not names
        alarms += bool(set(names) - must - may)
        mark, place = " " if right else "✗", f"{script.parent.name}/{script.name}"
        print(f"{mark} {place:60} {', '.join(sorted(must)) or '-':26} → {', '.join(names) or '-'}")
    clean = sum(not expected(script)[0] for script in chosen)
    print(f"{detected} of {detected + missed} bugs found; {silent} of {clean} clean scripts silent")
    print(f"{alarms} scripts with a false alarm")
    return int(missed + alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
