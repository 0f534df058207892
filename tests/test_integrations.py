"""The GitHub Action and the pre-commit hooks, as far as they can run without GitHub; SARIF by its structure."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import ROOT, environment

from lockstep.audit.catalog import KINDS, finding
from lockstep.audit.ignores import Ignore, Ignored
from lockstep.audit.model import Rank, Trace
from lockstep.audit.report import as_sarif
from lockstep.audit.source import Site
from lockstep.audit.verdict import Verdict
from lockstep.options import Audit

ACTION = ROOT / "integrations" / "github-action" / "action.yml"
ZOO = ROOT / "tests" / "audit" / "zoo"


def steps() -> dict[str, dict[str, Any]]:
    return {step.get("id", "upload"): step for step in yaml.safe_load(ACTION.read_text())["runs"]["steps"]}


def run_step(folder: Path, **inputs: str) -> tuple[int, dict[str, str], str]:
    """Status, outputs and summary of the step `audit`, run as the runner does."""
    files = {name: folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "RUNNER_TEMP")}
    files["RUNNER_TEMP"].mkdir()
    names = {"SCRIPT": "script", "FLAGS": "flags", "FAIL_ON": "fail-on"}
    assert steps()["audit"]["env"] == {name: f"${{{{ inputs.{value} }}}}" for name, value in names.items()}
    there = environment(**{name: str(path) for name, path in files.items()}, **inputs)
    (folder / "step.sh").write_text(steps()["audit"]["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"]
    done = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True, timeout=200, check=False)
    outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    return done.returncode, outputs, files["GITHUB_STEP_SUMMARY"].read_text()


@pytest.mark.slow
def test_the_action_fails_with_a_bug_and_leaves_its_sarif(tmp_path: Path) -> None:
    (tmp_path / "a script.py").write_text((ZOO / "06_epochs" / "bug_set_epoch_missing.py").read_text())
    status, outputs, summary = run_step(tmp_path, SCRIPT="'a script.py'", FLAGS="--steps 0", FAIL_ON="error")
    assert status == 1 and outputs["found"] == "true" and "error same-order" in summary
    (result,) = json.loads(Path(outputs["sarif"]).read_text())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20script.py"


def test_the_action_says_what_the_user_got_wrong(tmp_path: Path) -> None:
    status, outputs, summary = run_step(tmp_path, SCRIPT="absent.py", FLAGS="", FAIL_ON="error")
    assert status == 2 and "no script 'absent.py'" in summary and "found" not in outputs


def test_inputs_and_outputs_of_the_action_are_declared() -> None:
    action = yaml.safe_load(ACTION.read_text())
    used = set(re.findall(r"inputs\.([\w-]+)", ACTION.read_text()))
    assert used == set(action["inputs"])
    assert set(re.findall(r"steps\.audit\.outputs\.(\w+)", ACTION.read_text())) == {"sarif", "found"}


@pytest.mark.parametrize("file", [".pre-commit-hooks.yaml", "integrations/pre-commit/.pre-commit-config.yaml"])
def test_the_hooks_run_the_audit_before_a_push(file: str) -> None:
    loaded = yaml.safe_load((ROOT / file).read_text())
    (hook,) = loaded if isinstance(loaded, list) else loaded["repos"][0]["hooks"]
    assert hook["entry"] == "lockstep audit" and hook["stages"] == ["pre-push"] and not hook["pass_filenames"]
    known = {f"--{name.replace('_', '-')}" for name in Audit.__dataclass_fields__}
    own = hook.get("args", [])[: hook["args"].index("--")] if "args" in hook else []
    assert {word for word in own if word.startswith("--")} <= known


def test_sarif_has_what_the_standard_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("one\ntwo\n")
    at = Site(str(tmp_path / "train.py"), 2)
    found = [finding("same-order", "again", at, "seen"), finding("waits", "it waits"), finding("same-order", "x", at)]
    ignored = [Ignored(finding("starved", "slow", Site("/elsewhere/data.py", 3)), Ignore("starved", "--ignore"))]
    log = json.loads(as_sarif(Verdict(["train.py"], Trace([Rank(0, [], [], 0)]), found, ["a note"], ignored)))
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["same-order", "waits", "starved"]
    assert len(run["results"]) == 4 and run["invocations"][0]["executionSuccessful"] is True
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] in KINDS
        assert result["level"] in ("error", "warning", "note") and result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert place["region"]["startLine"] >= 1 and re.fullmatch(r"[\w%./:-]+", place["artifactLocation"]["uri"])
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "train.py"
    assert run["results"][1]["locations"][0]["physicalLocation"]["region"]["startLine"] == 1
    assert run["results"][3]["suppressions"][0]["kind"] == "external"
