"""The HTML report: all of it there, in one file, escaped, and true to the events."""

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.audit import report
from lockstep.audit.catalog import finding
from lockstep.audit.events import (
    Backward,
    Batch,
    Collective,
    End,
    Event,
    Forward,
    ModelInput,
    PassEnd,
    PassStart,
    Return,
    Start,
    Step,
)
from lockstep.audit.ignores import Ignore, Ignored
from lockstep.audit.model import Rank, Trace
from lockstep.audit.recorder import packed
from lockstep.audit.report import as_html
from lockstep.audit.report.ledger import ledger
from lockstep.audit.report.timeline import spans_of
from lockstep.audit.source import Site
from lockstep.audit.verdict import Verdict

VOID = {"meta", "br", "hr", "link", "img", "input"}
Part = list[int] | None
"""The samples of one rank's pass; None: the rank did not make it."""


class Log:
    """A rank's events, a millisecond apart."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.loaders = 0
        self.steps = 0
        self.write(Start({}))

    def write(self, event: Event, line: int = 1, later: float = 0.001) -> None:
        event.t = self.events[-1].t + later if self.events else 1000.0
        event.at = Site("train.py", line)
        self.events.append(event)

    def step(self) -> None:
        self.steps += 1
        for call in (Forward(True, True), Backward()):
            self.write(call, 15)
            self.write(Return(), 15)
        self.write(Step(0, self.steps, [0.1]), 16)

    def load(self, samples: list[int], line: int = 14, trains: bool = True, ends: bool = True, **loader: Any) -> None:
        """A pass over `samples` in two batches."""
        about = {"type": "TensorDataset", "sampler": "DistributedSampler", "size": 64, "batch_size": 8} | loader
        self.loaders += 1
        self.write(PassStart(self.loaders, 1, 0, **about), line)
        for part in (samples[: len(samples) // 2], samples[len(samples) // 2 :]):
            batch = Batch(self.loaders, 1, len(part), trains, loading=0.0005)
            if about.get("is_stream"):
                batch.hashes = packed(np.array(part, np.uint64))
            else:
                batch.index = part
            self.write(batch, line)
            if trains:
                self.step()
        if ends:
            self.write(PassEnd(self.loaders, 1), line)

    def rank(self, number: int, status: int | None = 0, error: str | None = None) -> Rank:
        if status is not None:
            self.write(End(status, error))
        return Rank(number, self.events, [], status)


def a_verdict(trace: Trace, *findings: Any, printed: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Verdict:
    for rank, text in zip(trace.ranks, printed, strict=False):
        rank.printed = text
    return Verdict(["train.py", "--lr", "0.1"], trace, list(findings), list(notes))


def trained(*parts: Part, **loader: Any) -> Trace:
    """A trace in which each rank made one pass over its part."""
    logs = [Log() for _ in parts]
    for log, part in zip(logs, parts, strict=True):
        if part is not None:
            log.load(part, **loader)
    return Trace([log.rank(n) for n, log in enumerate(logs)])


def evens_and_odds() -> Trace:
    return trained(list(range(0, 64, 2)), list(range(1, 64, 2)))


def hung() -> Trace:
    """Rank 0 waits in a barrier for rank 1, which is through."""
    ranks = []
    for number in range(2):
        log = Log()
        log.load(list(range(number, 64, 2)))
        if number == 0:
            log.write(Collective("barrier"), 13)
        ranks.append(log.rank(number, None if number == 0 else 0))
    return Trace(ranks, hung=True)


def captions(trace: Trace) -> list[str]:
    page = as_html(a_verdict(trace))
    return [unescape(text) for text in re.findall(r"<figcaption>(.*?)</figcaption>", page)]


class Balance(HTMLParser):
    """Fails if a tag is closed that was not the last one opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.opened and self.opened.pop() == tag, f"</{tag}> closes nothing"


def crashed() -> Trace:
    logs = [Log(), Log()]
    return Trace([log.rank(n, 1, "KeyError: '<tiny>'") for n, log in enumerate(logs)])


PAGES = {
    "clean": lambda: a_verdict(evens_and_odds()),
    "hung": lambda: a_verdict(hung(), finding("hangs", "the ranks wait", Site("train.py", 13))),
    "crashed": lambda: a_verdict(crashed(), finding("crashed", "rank 0 failed"), printed=("Traceback", "")),
    "no loader": lambda: a_verdict(Trace([Log().rank(n) for n in range(2)])),
    "nothing": lambda: a_verdict(Trace([Rank(0, [], [], 1), Rank(1, [], [], 1)]), finding("crashed", "status 1")),
}


@pytest.mark.parametrize("name", PAGES)
def test_tags_balance_and_nothing_comes_from_elsewhere(name: str) -> None:
    page = as_html(PAGES[name]())
    parser = Balance()
    parser.feed(page)
    assert not parser.opened
    for outside in ("http:", "https:", "//", "<script", "<link", "@import", "@font-face", "<img", "src="):
        assert outside not in page.lower(), outside


def test_every_section_is_there() -> None:
    found = finding("same-order", "two epochs have the same order", Site("gone.py", 14), "epochs 1 and 2")
    page = as_html(a_verdict(evens_and_odds(), found, printed=("done", ""), notes=("CUDA was mapped",)))
    for section in ("findings", "timeline", "samples", "notes", "printed"):
        assert f'<section id="{section}">' in page
    for text in (
        "train.py --lr 0.1",
        "2 ranks",
        "2 steps",
        "epochs 1 and 2",
        "gone.py:14",
        "CUDA was mapped",
    ):
        assert text in page
    assert "Two epochs have the same order." in page
    assert found.kind.why in page
    assert "sampler.set_epoch(epoch)" in page
    assert "<details><summary>Rank 0" in page and "<summary>Rank 1" not in page


def test_a_clean_verdict_says_so_and_has_no_findings() -> None:
    page = as_html(a_verdict(evens_and_odds()))
    assert 'class="verdict clean"' in page
    assert "<h1>nothing found: the ranks train one model on all of the data (2 ranks, 2 steps)</h1>" in page
    assert 'id="findings"' not in page


def test_the_top_says_what_is_wrong_where_and_what_to_type() -> None:
    found = finding("same-order", "two epochs have the same order", Site("train.py", 14))
    verdict = replace(a_verdict(evens_and_odds(), found), command="lockstep audit -- train.py")
    page = as_html(verdict)
    top = page[: page.index('<section id="findings">')]
    assert '<span class="badge">fails</span>' in top and "<code>lockstep audit -- train.py</code>" in top
    assert re.search(r'href="#finding-1">Two epochs have the same order\.</a>\s+<span class="place">train.py:14', top)
    assert 'id="finding-1"' in page and "# lockstep: ignore[same-order]</code> on line 14" in page


def test_what_is_ignored_is_listed_with_what_hides_it() -> None:
    ignored = [Ignored(finding("waits", "it waits", Site("train.py", 15)), Ignore("waits", "pyproject.toml"))]
    page = as_html(replace(a_verdict(evens_and_odds()), ignored=ignored))
    assert '<span class="badge">passes</span>' in page
    assert re.search(r"<code>waits</code> at train.py:15, by pyproject.toml:\s+It waits\.", page)


@pytest.mark.parametrize("names", [("hangs", "dead-setting"), ("dead-setting", "waits"), ("waits",)])
def test_the_verdict_has_the_colour_of_the_worst_finding(names: tuple[str, ...]) -> None:
    findings = [finding(name, "it is so") for name in names]
    page = as_html(a_verdict(evens_and_odds(), *findings))
    assert f'class="verdict {findings[0].severity}"' in page
    assert f"<h1>1 {findings[0].severity}" in page


def test_what_scripts_and_errors_say_is_escaped(tmp_path: Path) -> None:
    script = tmp_path / "a<b>.py"
    script.write_text("x = '<i>' & 1\n")
    evil = "<script>alert('&')</script>"
    found = finding("crashed", evil, Site(str(script), 1), evil)
    log = Log()
    log.load([0, 1], type=evil, sampler=evil)
    log.write(Collective(evil), 3)
    hanging = log.rank(0, None)
    hanging.stack = [Site(evil, 3)]
    verdict = a_verdict(Trace([hanging], hung=True), found, printed=(evil,), notes=(evil,))
    verdict.script.append(evil)
    page = as_html(verdict)
    assert "<script" not in page and "<i>" not in page and "a<b>" not in page
    assert "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;" in page
    assert "x = &#39;&lt;i&gt;&#39; &amp; 1" in page


def test_the_line_of_a_finding_is_marked_among_its_neighbours(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("".join(f"    line_{n}()\n" for n in range(1, 21)))
    page = as_html(a_verdict(evens_and_odds(), finding("waits", "it waits", Site(str(script), 10))))
    rows = re.findall(r'<span class="(row[^"]*)"><span class="number">(\d+)</span>([^\n]*)\n', page)
    assert [int(number) for _, number, _ in rows] == list(range(7, 14))
    assert [code for kind, _, code in rows if kind == "row marked"] == ["line_10()"]


@pytest.mark.parametrize("line", [0, 99])
def test_a_line_that_is_not_there_has_no_excerpt(tmp_path: Path, line: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("one\n")
    page = as_html(a_verdict(evens_and_odds(), finding("waits", "it waits", Site(str(script), line))))
    assert 'class="row' not in page


# -- timeline ---------------------------------------------------------------------------------------------------------
def test_a_hung_rank_is_hatched_and_says_what_it_waits_in() -> None:
    page = as_html(a_verdict(hung(), finding("hangs", "the ranks wait")))
    labels = re.findall(r'<text class="waiting"[^>]*>(.*?)</text>', page)
    assert labels == ["waits in barrier at train.py:13"]
    assert "barrier at train.py:13: never left" in page
    assert "<h1>1 error; the ranks hang (2 ranks, 2 steps)</h1>" in page
    assert "<li>rank 1 had ended</li>" in page


def test_a_rank_that_hangs_in_no_call_is_hatched_from_its_last_event() -> None:
    trace = hung()
    trace.ranks[0].events.pop()
    trace.ranks[0].stack = [Site("train.py", 17)]
    page = as_html(a_verdict(trace))
    assert re.findall(r'<text class="waiting"[^>]*>(.*?)</text>', page) == ["was at train.py:17"]
    assert '<rect class="hung" x=' in page


def test_a_crash_before_any_step_is_said_and_crossed() -> None:
    page = as_html(a_verdict(crashed(), finding("crashed", "rank 0 failed: KeyError")))
    assert "<h1>1 error; the script failed before its first step (2 ranks, 0 steps)</h1>" in page
    assert page.count("<title>failed</title>") == 2


def test_ranks_without_events_leave_the_page_whole() -> None:
    page = as_html(PAGES["nothing"]())
    assert "The ranks ended before there was anything to draw." in page
    assert "No sample came from a DataLoader" in page
    assert "The ranks printed nothing." in page


def test_steps_are_ticks_and_calls_are_spans() -> None:
    page = as_html(a_verdict(evens_and_odds()))
    for kind in ("loading", "forward", "backward"):
        assert len(re.findall(f'<rect class="{kind}" x=', page)) == 4
    assert page.count("<title>optimizer step ") == 4


def test_of_many_steps_the_last_are_drawn() -> None:
    log = Log()
    for _ in range(1000):
        log.step()
    page = as_html(a_verdict(Trace([log.rank(0)])))
    steps = [int(n) for n in re.findall(r"<title>optimizer step (\d+)", page)]
    assert steps == list(range(1000 - len(steps) + 1, 1001)) and len(steps) in (300, 301)
    assert len(re.findall(r'<rect class="\w+" x=', page)) <= 601
    assert "The last 600 calls only, without the 3.50 s before them." in page


def test_loading_is_drawn_before_its_batch() -> None:
    log = Log()
    log.write(Batch(1, 1, 2, loading=0.0005))
    log.write(Batch(1, 1, 2, loading=0.004), later=0.010)
    spans = [(s.kind, s.start - 1000, s.end - 1000) for s in spans_of(Rank(0, log.events, [], 0), 0)]
    assert spans == [
        ("loading", pytest.approx(start), pytest.approx(end)) for start, end in ((0.0005, 0.001), (0.007, 0.011))
    ]


# -- ledger -----------------------------------------------------------------------------------------------------------
def test_the_ledger_says_that_each_sample_came_once() -> None:
    assert captions(evens_and_odds()) == ["Each of 64 samples once."]


def test_the_ledger_counts_samples_on_several_ranks_and_on_none() -> None:
    trace = trained(list(range(43)), [*range(11, 43), *range(43, 54)])
    assert captions(trace) == ["32 samples on several ranks, 10 on none, of 64."]
    name, kinds = list(ledger(trace)[0].rows)[-1]
    assert name == "not once" and "<path class=" in as_html(a_verdict(trace))
    assert [n for n, cell in enumerate(kinds["several"]) if cell] == list(range(11, 43))
    assert [n for n, cell in enumerate(kinds["unseen"]) if cell] == list(range(54, 64))


def test_the_ledger_of_an_exact_pass_marks_nothing() -> None:
    page = as_html(a_verdict(evens_and_odds()))
    assert "not once</div>" in page
    assert '<path class="several"' not in page and '<path class="unseen"' not in page


def test_the_ledger_tells_samples_that_come_again_on_one_rank() -> None:
    assert captions(trained([*range(63), 0])) == ["1 sample more than once on one rank, 1 on none, of 64."]


def test_the_ledger_of_a_pass_that_was_not_finished_marks_nothing_unseen() -> None:
    trace = trained(list(range(20)), list(range(20, 40)), ends=False)
    assert captions(trace) == ["Each of 40 samples once. The pass was not finished; there are 64."]


def test_the_ledger_says_if_every_rank_had_everything() -> None:
    everything = list(range(64))
    assert captions(trained(everything, everything)) == ["All 64 samples on every rank."]
    page = as_html(a_verdict(trained(everything, everything, trains=False)))
    assert "Evaluation, pass 1" in page and "not once</div>" not in page


def test_the_ledger_knows_batches_that_are_cut_up_after_loading() -> None:
    logs = [Log(), Log()]
    for log in logs:
        log.load(list(range(64)))
        first = next(n for n, event in enumerate(log.events) if isinstance(event, Batch))
        log.events.insert(first + 1, ModelInput(1, rows=16, t=log.events[first].t))
    trace = Trace([log.rank(n) for n, log in enumerate(logs)])
    assert captions(trace) == ["All 64 samples on every rank; of each batch a rank gives the model its part only."]


def test_the_ledger_names_ranks_that_made_a_pass_alone() -> None:
    trace = trained(list(range(64)), None, None, trains=False)
    assert captions(trace) == ["Only rank 0 made this pass. Each of 64 samples once."]


def test_the_ledger_counts_in_the_part_of_the_set_that_is_used() -> None:
    trace = trained([10, 12], [14], subset=[10, 12, 14, 16], size=4)
    assert captions(trace) == ["1 sample on none, of 4."]


def test_the_ledger_of_a_stream_goes_by_what_its_samples_hold() -> None:
    caption = captions(trained([7, 8, 9, 10], [9, 10, 11, 12], is_stream=True, size=None))[0]
    assert caption.startswith("2 samples on several ranks, of 6.")


def test_the_ledger_does_not_guess_samples_that_it_cannot_know() -> None:
    log = Log()
    log.load([0, 1])
    for event in log.events:
        if isinstance(event, Batch):
            event.index = []
    assert captions(Trace([log.rank(0)])) == ["Which samples were given is not known."]


def test_large_sets_and_many_passes_stay_small() -> None:
    log = Log()
    for _ in range(20):
        log.load(list(range(5000)), size=5000)
    page = as_html(a_verdict(Trace([log.rank(0)])))
    assert page.count("<figure>") == 8
    assert "<summary>12 further passes</summary>" in page
    assert "Training, pass 20: Each of 5000 samples once." in page
    assert len(page) < 60_000


# -- output and colours -----------------------------------------------------------------------------------------------
def test_of_what_was_printed_the_last_lines_are_shown_as_they_stood() -> None:
    text = "".join(f"line {n}\n" for n in range(100)) + "\x1b[31m 10%\r 50%\r100%\x1b[0m\n"
    page = as_html(a_verdict(evens_and_odds(), printed=(text,)))
    assert "last 60 of 101 lines" in page
    assert "line 41\n" in page and "line 40\n" not in page
    assert "100%</code>" in page and "50%" not in page and "\x1b" not in page


def _luminance(colour: str) -> float:
    parts = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_pictures_have_enough_contrast(scheme: str) -> None:
    style = Path(report.__file__).with_name("style.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--(\w+): (#\w{6})", light if scheme == "light" else dark))
    for name in ("text", "muted", "error", "warning", "note", "clean"):
        for ground in ("page", "card"):
            assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for name in ("text", "muted"):
        assert _contrast(colours[name], colours["mark"]) >= 4.5
    for name in ("loading", "forward", "backward", "collective", "given", "several", "unseen"):
        assert _contrast(colours[name], colours["page"]) >= 3, name
