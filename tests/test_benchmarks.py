"""Every benchmark runs, at a tiny size."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from processes import environment

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


SMALL = ("--preset", "laptop", "--device", "cpu")


def printed(name: str, *flags: str) -> str:
    """Return the output of a benchmark of micro-batches of 2. Its exit status is no matter: times mean nothing here."""
    command, variables = ["python", str(BENCHMARKS / name), *flags], environment(LOCKSTEP_SMOKE="2")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_watching_prints_the_cost_of_probes_and_checks() -> None:
    step, audit, check = printed("watching.py", *SMALL, "--rounds", "1", "--steps", "2").splitlines()
    assert re.fullmatch(r"a step of dit: \d+\.\d ms", step)
    assert re.fullmatch(r"the audit's probes: -?\d+\.\d\d % of a step \(claimed: below 5 %\)", audit)
    assert re.fullmatch(r"the checks of every run: \d+\.\d{3} % \(claimed: below 0.5 %\)", check)


@pytest.mark.slow
def test_step_prints_the_ratio_to_a_step_written_by_hand() -> None:
    result = json.loads(printed("step.py", *SMALL, "--steps", "1"))
    assert result["device"] == "cpu" and result["ratio"] > 0 and result["images_per_second"] > 0
    assert set(result["seconds"]) == {"lockstep", "by hand", "lockstep again"}


@pytest.mark.slow
def test_sharding_prints_the_memory_of_each_strategy() -> None:
    lines = printed("sharding.py", "--width", "1024", "--depth", "12", "--ranks", "4").splitlines()
    assert lines[0].startswith("DiT of given: ") and len(lines) == 5
    together = [float(line.rpartition("together ")[2].split()[0]) for line in lines[1:4]]
    assert together[0] > together[1] > together[2] > 0


@pytest.mark.slow
def test_sharding_prints_how_long_a_checkpoint_takes(tmp_path: Path) -> None:
    line = printed("sharding.py", "--checkpoint", "0.004", "--ranks", "2", "--out", str(tmp_path))
    assert re.search(r"^0.00 GB by 2 ranks on cpu: pause \d.*, verified and loaded whole in \d+\.\d\d s$", line, re.M)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_endurance_finds_nothing_that_grows_or_collides() -> None:
    lines = printed("endurance.py", "--checkpoints", "60", "--runs", "4").splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [f"after {n} checkpoints" for n in (6, 30, 60)]
    early, late = (re.search(r"open_files (\d+), threads (\d+), files (\d+)", lines[i]) for i in (0, 2))
    assert early and late and early.groups() == late.groups()
    assert lines[4].startswith(
        "4 runs at once: 4 complete in 4 folders with 1 kind(s) of weights, 0 file(s) left behind"
    )


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount small disks and cut links")
def test_chaos_ends_with_the_bits_of_the_undisturbed_run_and_goes_on_from_its_state(tmp_path: Path) -> None:
    flags = ["--seed", "7", "--state", str(tmp_path / "state.json")]
    first = printed("chaos.py", "--faults", "1", "--jobs", "1", *flags)
    summary = json.loads(first.splitlines()[-1])
    assert summary["runs"] == summary["runs_equal_to_the_bit"] == 1 and summary["faults"] >= 1
    assert printed("chaos.py", "--faults", "1", *flags) == first


def test_companion_prints_what_a_script_pays() -> None:
    step, hooks, comparison = printed("companion.py", "--width", "8", "--steps", "1").splitlines()
    assert re.fullmatch(r"a step: [\d.]+ ms, [\d,]+ parameters in 48 tensors", step)
    assert re.match(r"hooks: -?[\d.]+ % of a step", hooks)
    assert re.fullmatch(r"a comparison every 50 steps: [\d.]+ % \(claimed: below 0.5 %\)", comparison)


@pytest.mark.slow
def test_growth_prints_every_curve_and_draws_them(tmp_path: Path) -> None:
    flags = ["--scale", "0.02", "--worlds", "1,2", "--plot", str(tmp_path / "growth.png")]
    *rows, last = printed("growth.py", *flags).splitlines()
    found = json.loads(last)
    assert len(rows) == len(found) == 6 and (tmp_path / "growth.png").stat().st_size > 10_000
    assert set(found["agreement beside the gradients, ms, by ranks"]) == {"1", "2"}
    assert all(value > 0 for value in found["indices of a global batch of 256, ms, by samples"].values())


def test_every_benchmark_has_a_test_here() -> None:
    for path in BENCHMARKS.glob("*.py"):
        assert f'printed("{path.name}"' in Path(__file__).read_text(), path.name


@pytest.mark.slow
def test_exact_prints_the_cost_of_exact_sums() -> None:
    *rows, last = printed("exact.py", *SMALL, "--tiles", "1,2", "--rounds", "1", "--steps", "1").splitlines()
    cost = r"dit, exact, [12] tile\(s\): [\d.]+ ms per step, .* of the plain one"
    digests = r"dit, exact, [12] tile\(s\): [\d.]+ ms for the digests of a step, [\d.]+ % of a step with .* 20"
    assert len(rows) == 4 and all(re.fullmatch(p, row) for p, row in zip([cost, digests] * 2, rows, strict=True))
    assert set(json.loads(last)["seconds"]) == {f"{kind}, {n} tile(s)" for kind in ("plain", "exact") for n in (1, 2)}


@pytest.mark.slow
def test_exact_says_where_the_time_goes() -> None:
    flags = ("--tiles", "2", "--rounds", "1", "--steps", "1", "--profile")
    lines = printed("exact.py", "--recipe", f"{Path(__file__).parent / 'tiny.py'}:Tiny", "--device", "cpu", *flags)
    assert re.search(r"busy: [\d.]+ ms of a plain step, [\d.]+ ms of an exact one", lines)
    differences = re.findall(r"^  \s*([+-][\d.]+) ms  \s*([\d.]+) -> \s*([\d.]+)  (\S+)$", lines, re.MULTILINE)
    assert len(differences) == 15
    assert all(abs(float(b) - float(a) - float(d)) < 0.0021 for d, a, b, _ in differences)


@pytest.mark.slow
def test_spot_prints_the_cost_of_a_check_in_tiles() -> None:
    line, last = printed("spot.py", *SMALL, "--steps", "1").splitlines()[-2:]
    assert re.fullmatch(r"dit, 1 tile.*, a check as long as -?[\d.]+ tiles; every 200 steps that is -?[\d.]+ %", line)
    assert set(json.loads(last)) == {"device", "step", "checked", "share"}


@pytest.mark.slow
def test_exact_accuracy_prints_errors_of_both_kinds_of_sums() -> None:
    (line,) = printed("exact_accuracy.py", "--recipes", "vision", "--steps", "1", "--tiles", "2").splitlines()
    found = json.loads(line.split("gradients: ")[1])
    assert all(float(error) < 1e-5 for error in found.values()) and "grid, median" in found


@pytest.mark.slow
def test_exact_picture_draws_both_kinds_of_runs(tmp_path: Path) -> None:
    picture = tmp_path / "exact.png"
    recipe = f"{Path(__file__).parent / 'tiny.py'}:Tiny"
    said = printed("exact_picture.py", "--recipe", recipe, "--worlds", "1,2", "--steps", "3", "--out", str(picture))
    assert "exact: max weight difference after 3 steps: 0\n" in said and picture.stat().st_size > 10_000


def test_the_public_score_says_how_many_findings_are_right() -> None:
    *rows, last = printed("audit_public.py").splitlines()
    assert [row.split()[0] for row in rows] == ["error", "warning", "note"]
    counts = [[int(number) for number in re.findall(r"\d+", row)] for row in rows]
    assert all(right <= found and known <= there for right, found, known, there in counts)
    assert re.fullmatch(r"\d+ of \d+ scripts were run", last)
