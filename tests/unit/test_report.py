"""The report: exact figures, a page on which nothing that a model wrote does anything, what it says of lost files."""

import json
import random
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.unit.make import record
from tests.unit.test_dataset import store
from tokenmill import report
from tokenmill.core import starts
from tokenmill.core.judge import Rules
from tokenmill.core.records import Parts, Record
from tokenmill.events import Event
from tokenmill.folder import RunFolder
from tokenmill.history import Moment, ServerMoment
from tokenmill.report import Ending
from tokenmill.reporting import columns, course, figures
from tokenmill.reporting.answer import Report
from tokenmill.reporting.clock import clock
from tokenmill.reporting.columns import Columns, Row
from tokenmill.reporting.notices import MOST, Notices

NEVER = np.array([])

BEGAN = 1_700_000_000.0


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)


def rows(*records: Record) -> Columns:
    made = (msgspec.convert(msgspec.structs.asdict(one), Row, strict=False, from_attributes=True) for one in records)
    return columns.read(made, Rules())


def some(rng: random.Random, count: int) -> list[Record]:
    return [
        record(
            f"k{n}",
            n,
            prompt_tokens=rng.randrange(1, 9000),
            output_tokens=rng.randrange(0, 9000),
            server=str(rng.randrange(3)),
            started=BEGAN + rng.uniform(0, 500),
            seconds=rng.uniform(0.1, 300),
        )
        for n in range(count)
    ]


# -- figures -----------------------------------------------------------------------------------------------------------
def test_what_a_cut_costs_is_counted_token_by_token(rng: random.Random) -> None:
    made = some(rng, 200)
    found = figures.masks(rows(*made))
    assert found.supervised is not None
    for clip in found.clips:
        beyond = [sum(at >= clip.length for at in _supervised(one)) for one in made]
        assert clip.tokens == sum(beyond)
        assert clip.rows == sum(one.prompt_tokens + one.output_tokens > clip.length for one in made)
        assert clip.emptied == sum(0 < lost == one.output_tokens for lost, one in zip(beyond, made, strict=True))


def _supervised(one: Record) -> range:
    return range(one.prompt_tokens, one.prompt_tokens + one.output_tokens)


@pytest.mark.parametrize("values", [[0], [7], [0, 0, 5000], [1500, 1512, 1530, 1600], list(range(300)), [131072, 1]])
def test_every_length_is_in_one_bin(values: list[int]) -> None:
    found = figures.spread(np.array(values, dtype=np.uint32))
    assert found is not None
    assert sum(found.counts) == len(values) == found.count
    assert (found.total, found.most) == (sum(values), max(values))
    assert found.bounds == sorted(set(found.bounds))
    assert len(found.bounds) < 80


def test_a_server_is_marked_for_what_is_beyond_chance_only() -> None:
    fleet = [figures.ServerFigures(str(n), 1000, 0, 0, 0, 0, 0.0, None, None) for n in range(3)]

    def marked(*counts: int) -> list[str]:
        row = figures.LabelCount("repetition", sum(counts), 0.0, True, list(counts))
        return [outlier.server for outlier in figures.outliers([row], fleet)]

    assert marked(10, 10, 60) == ["2"]
    assert marked(10, 10, 22) == [], "twice as many, of few"
    assert marked(200, 200, 260) == [], "not twice as many"
    assert marked(0, 0, 2) == []
    assert marked(0, 1000, 0) == ["1"]


# -- over time ---------------------------------------------------------------------------------------------------------
def test_tokens_are_spread_over_their_seconds_and_none_is_lost(rng: random.Random) -> None:
    made = some(rng, 100)
    found = rows(*made)
    edges = clock([(found.began, found.ended)]).bins(37)
    rates = course.rates(found, found.answered, edges)
    widths = np.concatenate([np.diff(one) for one in edges])
    assert float((rates * widths).sum()) == pytest.approx(sum(one.output_tokens for one in made), rel=1e-6)
    middle = len(widths) // 2
    low, high = edges[0][middle], edges[0][middle + 1]
    wanted = sum(
        one.output_tokens * max(0.0, min(high, one.started + one.seconds) - max(low, one.started)) / one.seconds
        for one in made
    )
    assert float(rates[middle] * widths[middle]) == pytest.approx(wanted, rel=1e-4)


def test_a_nights_stop_takes_no_room() -> None:
    begins = np.array([0.0, 1000.0, 60_000.0]) + BEGAN
    made = clock([(begins, begins + 1500)])
    assert [(a - BEGAN, b - BEGAN) for a, b in made.spans] == [(0.0, 2500.0), (60_000.0, 61_500.0)]
    assert made.on_s == 4000.0
    places = made.places(np.array([0, 2500, 60_000, 61_500]) + BEGAN).tolist()
    assert places == pytest.approx([0.0, 0.6125, 0.6325, 1.0])
    ticks = made.ticks()
    assert all(0 <= tick.place <= 1 for tick in ticks)
    assert [tick.place for tick in ticks] == sorted(tick.place for tick in ticks)


def _life() -> Iterator[Event]:
    yield Event(10, "state", "pending → starting", "0")
    yield Event(
        40, "ready", "ready after 30 s (weights 20 s, canary 4 s): it takes 4 requests at once, limited by x", "0"
    )
    yield Event(40, "state", "canary → ready", "0")
    yield Event(90, "server", "it died (exit code 1); started again in 5 s", "0", "warn")
    yield Event(90, "state", "ready → backoff", "0")
    yield Event(95, "state", "backoff → starting", "0")
    yield Event(97, "state", "starting → backoff", "0")
    yield Event(99, "state", "backoff → starting", "0")
    yield Event(120, "state", "canary → ready", "0")


def test_starts_and_losses_are_read_from_the_events() -> None:
    happened = list(_life())
    first, second = course.began(happened)
    assert (first.seconds, first.phases) == (30, [("weights", 20.0), ("canary", 4.0)])
    assert (second.began, second.seconds, second.phases) == (99, 21, [])
    (loss,) = course.losses(happened)
    assert (loss.t, loss.away_s) == (90, 30)
    assert loss.text.startswith("it died")
    assert [(stay.state, stay.ended - stay.began) for stay in course.stays(happened, 200.0, NEVER)] == [
        *[("starting", 30), ("ready", 50), ("backoff", 5), ("starting", 2), ("backoff", 2), ("starting", 21)],
        ("ready", 80),
    ]


def test_a_server_was_not_ready_while_nobody_watched_it() -> None:
    """tokenmill was killed at 140, and started again at 1000."""
    happened = [
        Event(40, "state", "canary → ready", "0"),
        Event(50, "state", "canary → ready", "1"),
        Event(1000, "state", "pending → starting", "0"),
        Event(1030, "state", "pending → starting", "1"),
    ]
    signs = np.array([60.0, 135.0, 1001.0])
    assert [(stay.server, stay.state, stay.began, stay.ended) for stay in course.stays(happened, 1100.0, signs)] == [
        ("0", "ready", 40, 135),
        ("1", "ready", 50, 135),
        ("0", "starting", 1000, 1100),
        ("1", "starting", 1030, 1100),
    ]


def test_the_words_of_a_start_are_read_back() -> None:
    phases = [("begin", 21.0), ("cuda graphs, target", 63.0), ("canary", 4.0)]
    text = f"ready after 90 s ({starts.words(phases)}): it takes 56 requests at once, limited by mamba"
    assert starts.told(text) == (90.0, phases)
    assert starts.told("ready: it takes 4 requests at once, limited by slots") is None


def test_warnings_that_differ_in_numbers_are_told_once() -> None:
    told = Notices()
    for n in range(1000):
        told.add(Event(n, "copy", f"round {n} failed after {n / 3:.1f} s", level="warn"))
    (row,) = told.rows
    assert (row.count, row.first, row.last) == (1000, 0, 999)
    assert row.text.startswith("round 999")
    for n in range(MOST + 10):
        told.add(Event(n, "odd", "x" * n, level="error"))
    assert len(told.rows) == MOST
    assert told.left_out == 11
    assert told.rows[0].level == "error"


# -- the page ----------------------------------------------------------------------------------------------------------
HOSTILE = '</pre><script>alert(1)</script><img src="https://evil.example/x" onerror=alert(2)> \u202eevil\u202c \x07'


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href") or name.startswith("on")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)


def _write(folder: Path, ending: Ending) -> tuple[Report, str]:
    path = report.write(RunFolder(folder), ending)
    figures_found = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Report)
    page = path.read_text(encoding="utf-8")
    parsed = _Page(page)
    assert parsed.open == [], "a tag that is not closed"
    assert all(link.startswith("#") for link in parsed.links)
    assert {"script", "img", "link", "iframe"} & parsed.tags == set()
    return figures_found, page


def run_folder(path: Path, records: list[Record]) -> Path:
    (path / "data").mkdir(parents=True)
    half = len(records) // 2
    store(path / "data", records[:half], records[half:])
    return path


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    messages = msgspec.Raw(json.dumps([{"role": HOSTILE[:60], "content": HOSTILE[:90]}]).encode())
    bad = {"text": HOSTILE, "messages": messages, "labels": ("repetition",), "repetition": 50.0}
    made = [record(f"k{n}<b>", n, parts=Parts(0, 20, 20, len(HOSTILE)), **bad) for n in range(6)]
    folder = run_folder(tmp_path / "run", made)
    happened = Event(BEGAN, "server", HOSTILE[:60], "0<i>", "warn", HOSTILE[:60])
    (folder / "events.jsonl").write_bytes(msgspec.json.encode(happened) + b"\n")
    found, page = _write(folder, Ending("failed", 6, f"the gate {HOSTILE[:60]}\nsecond"))
    assert [kind.labels for kind in found.examples] == [["repetition"]]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert '<i class="code" title="RIGHT-TO-LEFT OVERRIDE">U+202E</i>evil' in page
    assert "\u202e" not in page.replace("U+202E", "")
    assert "\x07" not in page


def test_a_run_folder_from_before_history_and_an_empty_one_have_a_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "old", some(random.Random(1), 40))
    found, page = _write(folder, Ending("stopped", None))
    assert found.verdict == "Of an unknown number, 40 completions have ended, 40 of them accepted."
    missing = ("config.toml", "history.jsonl", "events.jsonl", "settings.jsonl", "environment.jsonl", "status.json")
    assert all(any(name in words for words in found.unknown) for name in missing)
    assert "Throughput" in page
    assert found.course.slots_busy is None
    (tmp_path / "empty").mkdir()
    found, page = _write(tmp_path / "empty", Ending("preflight", 0))
    assert found.verdict == "Empty (preflight): no completion has been asked for."
    assert "<svg" not in page


def test_a_damaged_part_is_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [record(f"k{n}", n) for n in range(10)])
    part = folder / "data" / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    for name in ("history.jsonl", "events.jsonl", "environment.jsonl", "config.toml", "data/settings.jsonl"):
        (folder / name).write_bytes(b'\xff{"t": \n[1, 2\n{}\n')
    found, page = _write(folder, Ending("killed", 10))
    assert found.verdict == "Killed: 5 of 10 completions have ended, 5 of them accepted; 5 are still to be asked for."
    assert any("part-000001.parquet is damaged" in words for words in found.unknown)
    assert "mv " in page
    assert any(words.startswith("config.toml cannot be read") for words in found.unknown)


def test_a_gate_stop_ends_with_the_command_that_goes_on(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [record(f"k{n}", n, output_ids=msgspec.Raw(b"null")) for n in range(4)])
    command = "tokenmill run x.toml --set gate.max_rejected=0.8"
    found, _ = _write(folder, Ending("failed", 10, f"the gate stopped the run: x\n  to go on nevertheless: {command}"))
    assert found.verdict == "Stopped: the gate stopped the run: x."
    assert found.next[0].command == command
    assert "specforge-chat OUT" in found.next[-1].command, "there are no token ids"
    assert not found.good


def test_speculation_and_slots_are_read_from_history(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [record(f"k{n}", n, started=BEGAN + n, server=str(n % 2)) for n in range(100)])
    lines = [
        Moment(BEGAN + n, "generating", slots_busy=0.5, servers=tuple(_two(2.0 + number) for number in range(2)))
        for n in range(100)
    ]
    named = [
        msgspec.structs.replace(
            line, servers=tuple(msgspec.structs.replace(s, name=str(n)) for n, s in enumerate(line.servers))
        )
        for line in lines
    ]
    (folder / "history.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in named))
    found, page = _write(folder, Ending("done", 100))
    assert "accepted 2.50 tokens in the mean; server 0 the fewest, 2.00, server 1 the most, 3.00" in page
    assert "Slots were 50% busy" in page
    assert found.good
    assert json.loads((folder / "report.json").read_text())["counts"] == [100, 0, 0, 0]


def _two(length: float) -> ServerMoment:
    return ServerMoment("", "ready", 2, 4, 100.0, length)


def test_many_records_make_a_small_page(tmp_path: Path) -> None:
    made = some(random.Random(2), 3000)
    labels = ("repetition", "bad_text", "short_mask", "empty_answer", "orphan_think_tag", "missing_end_token")
    long = "word " * 4000
    bad = [
        record(f"b{n}", 3000 + n, labels=(labels[n % 6], labels[n % 5]), text=long, parts=Parts(0, 9000, 9000, 20000))
        for n in range(60)
    ]
    _, page = _write(run_folder(tmp_path, made + bad), Ending("done", 3060))
    assert len(page) < 400_000
