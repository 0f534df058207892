"""The page of a run: what it shows, that it needs nothing else, and that nothing in a run can break it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine import train
from PIL import Image

from lockstep.commands import report
from lockstep.distributed import World
from lockstep.report import pictures
from lockstep.report.facts import RunFacts, duration
from lockstep.report.html import charts, write_page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps that writes its page at the end."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    flags = ["--n_steps", "12", "--log_every", "2", "--eval_every", "4", "--out", str(out)]
    train(World(), "Labelled", flags)
    return out


class Page(HTMLParser):
    """The words, the addresses and the data of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.words, self.addresses, self.open = "", list[str](), list[str]()
        self.data: list[dict[str, Any]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img", "line", "br"):
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data = json.loads(data) if data.startswith("[") else self.data
        elif self.open and self.open[-1] != "style":
            self.words += data


def test_a_run_writes_its_page_at_the_end(run: Path) -> None:
    page = Page(run / "report.html")
    assert not page.open, "every element is closed"
    for text in ("12 of 12", "complete", "Where the time went", "rank 0", "replicas hold the same tensors", "✓"):
        assert text in page.words, text
    assert f"lockstep train labelled --config {run}/config.yaml" in page.words or ".py:Labelled" in page.words
    titles = {chart["title"]: chart for chart in page.data}
    assert {"loss", "lr", "grad_norm"} <= titles.keys()
    training, validation = (
        next(x for x in titles["loss"]["lines"] if x["label"] == n) for n in ("training", "validation")
    )
    assert [step for step, _ in training["points"]] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in validation["points"]] == [4, 8, 12]


def test_the_page_needs_no_other_file_and_no_network(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert all(address.startswith(("data:", "#")) for address in Page(run / "report.html").addresses)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", text)


def test_no_page_is_written_without_the_flag(tmp_path: Path) -> None:
    train(World(), "Labelled", ["--n_steps", "2", "--no_report", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run/report.html").exists()


def test_two_runs_stand_side_by_side(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(World(), "Labelled", ["--n_steps", "4", "--log_every", "2", "--lr", "0.5", "--out", str(tmp_path / "other")])
    assert report.run([str(run), str(tmp_path / "other"), "--out", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path}/both.html\n")
    page = Page(tmp_path / "both.html")
    assert "Settings that differ" in page.words and "0.5" in page.words
    loss = next(chart for chart in page.data if chart["title"] == "loss")
    assert {(line["run"], line["label"].split("/")[-1]) for line in loss["lines"]} >= {(0, "mine"), (1, "other")}


def test_nothing_in_a_run_is_taken_for_markup(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<b>run</b>"
    shutil.copytree(run, folder)
    with (folder / "log.txt").open("a") as log:
        log.write("<script>alert(1)</script>\n")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(
            '{"step": 2, "time": 1, "</script><b>": 1.0}\n{"step": 4, "time": 2, "</script><b>": 2.0}\nrubbish\n'
        )
    write_page([folder], folder / "report.html")
    page = Page(folder / "report.html")
    assert not page.open and "<b>run</b>" in page.words and "<script>alert(1)</script>" in page.words
    assert "</script><b>" in {chart["title"] for chart in page.data}


def test_a_run_without_any_values_has_a_page(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "receipt.json", tmp_path)
    write_page([tmp_path], tmp_path / "report.html")
    assert "at step 0 of 12" in Page(tmp_path / "report.html").words


def test_values_that_are_not_finite_are_gaps(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "receipt.json", tmp_path)
    rows = [{"step": step, "time": step, "loss": None if step == 2 else float(step)} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (chart,) = charts([RunFacts.read(tmp_path)], lambda _: True)
    assert chart["lines"][0]["points"] == [(1, 1.0), (3, 3.0)]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no receipt\.json that can be read"):
        report.run([str(tmp_path)])
    with pytest.raises(ValueError, match="say which run"):
        report.run([])


def test_pictures_are_shown_in_the_order_of_steps_and_thinned_evenly(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for step in range(9):
        Image.effect_noise((64, 64), 80).save(tmp_path / f"samples/step-{step:08d}-grid-ema.png")
    (tmp_path / "samples/step-00000009-grid-ema.png").write_bytes(b"not a picture")
    (tmp_path / "samples/step-00000003-score.json").write_text("{}")
    shown, left_out = pictures.sample_pictures(tmp_path)
    assert [picture.step for picture in shown["grid-ema"]] == list(range(9)) and left_out == 1
    size = max(len(picture.data) for picture in shown["grid-ema"])
    few, left_out = pictures.sample_pictures(tmp_path, limit=4 * size)
    steps = [picture.step for picture in few["grid-ema"]]
    assert steps[0] == 0 and len(steps) + left_out == 10 and max(b - a for a, b in pairwise(steps)) <= 4
    wide = tmp_path / "wide.png"
    Image.new("L", (2000, 100)).save(wide)
    assert len(pictures.small_copy(wide)) < 20_000


@pytest.mark.parametrize(("seconds", "text"), [(3.21, "3.2 s"), (125, "2 min 5 s"), (7380, "2 h 3 min")])
def test_durations_are_said_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_every_chart(run: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run([*command, f"file://{run}/report.html"], capture_output=True, text=True, timeout=300)
    drawn = re.findall(r'<svg [^>]*aria-label="([^"]+)"', done.stdout)
    assert {"loss", "lr", "grad_norm"} <= set(drawn)
    assert done.stdout.count("<path") >= len(drawn)
