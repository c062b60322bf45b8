"""The meter on made-up series: a server whose slots all go at one speed, seen as tokenmill sees it."""

import heapq
import random

import pytest

from tokenmill.core.efficiency import Efficiency, Meter, of_peak, words
from tokenmill.core.occupancy import Slots, Work, waited
from tokenmill.core.peak import FULL, Peak, Stretches

SPEED = 20.0
"""Tokens a second of a slot."""


class Series:
    """One server of `width` slots with heavy-tailed lengths; `turn_s`: tokenmill's own time between two requests."""

    def __init__(self, seed: int, width: int = 16, stretch_s: float = 30.0, name: str = "0") -> None:
        print("seed", seed)
        self.random = random.Random(seed)
        self.width, self.name = width, name
        self.slots = Slots(0.0, stretch_s)
        self.now = 0.0
        self.speed, self.turn_s, self.context = SPEED, 0.0, 100.0
        self.queue, self.held = 10**9, False
        self._busy: list[tuple[float, float, int]] = []
        self._turning: list[float] = []
        self.gone = Work()

    def run(self, meter: Meter, seconds: float, *, ending: bool = False) -> None:
        """Goes on for so long, looked at each second."""
        for _ in range(round(seconds)):
            self._go_on(self.now + 1.0)
            meter.look(self.now, {self.name: (self.work, self.peak)}, ending=ending)

    @property
    def peak(self) -> Peak | None:
        return self.slots.stretches.peak if self.slots.stretches else None

    @property
    def work(self) -> Work:
        return self.gone.plus(self.slots.work)

    def _go_on(self, until: float) -> None:
        self._fill()
        while (due := min([*(each[0] for each in self._busy[:1]), *self._turning[:1]], default=until)) < until:
            self._at(due)
            if self._turning and self._turning[0] <= due:
                heapq.heappop(self._turning)
                self.slots.asked -= 1
            else:
                _, asked, tokens = heapq.heappop(self._busy)
                self.slots.ends(due, asked, lost=False)
                self.slots.answer(due, asked, tokens, self.context)
                heapq.heappush(self._turning, due + self.turn_s)
            self._fill()
        self._at(until)

    def _at(self, moment: float) -> None:
        self.now = moment
        self.slots.until(moment, self.width, self.held)

    def _fill(self) -> None:
        while self.queue and not self.held and self.slots.asked < self.width:
            self.queue -= 1
            tokens = max(1, int(self.random.lognormvariate(4.0, 1.0)))
            self.slots.asked += 1
            self.slots.begins(self.now)
            heapq.heappush(self._busy, (self.now + tokens / self.speed, self.now, tokens))


def found(meter: Meter) -> Efficiency:
    assert meter.efficiency is not None
    one = meter.efficiency
    if one.share is not None and one.share < 1:
        assert one.share + sum(one.missing.values()) == pytest.approx(1.0, abs=1e-9), "the parts add up"
    return one


def test_full_server_is_at_its_peak() -> None:
    meter, series = Meter(), Series(1)
    meter.look(0.0, {}, ending=False)
    assert meter.efficiency is None, "nothing is measured"
    series.run(meter, 20)
    assert found(meter).share is None
    assert "not known yet" in words(found(meter))
    series.run(meter, 180)
    one = found(meter)
    assert one.share == pytest.approx(1.0, abs=0.01)
    assert one.peak_tokens_per_s == pytest.approx(16 * SPEED, rel=0.02)
    assert one.error < 0.01, "heavy-tailed lengths cost no accuracy: it is speeds that are compared"
    assert (one.measured, one.servers, one.is_full, len([*of_peak(one)])) == (1, 1, True, 1)


@pytest.mark.parametrize("cause", ["queue", "end", "client", "restarts", "contexts", "slower", "failed"])
def test_what_is_missing_is_laid_at_its_cause(cause: str) -> None:
    meter, series = Meter(), Series(2)
    series.run(meter, 120)
    match cause:
        case "queue" | "end":
            series.queue = 0
        case "client":
            series.turn_s = 3.0
        case "restarts":
            series.held = True
        case "contexts":
            series.speed, series.context = SPEED / 2, 150.0
        case "slower":
            series.speed = SPEED / 2
        case "failed":  # it hangs and is killed: what was in flight is lost, a new life takes its place
            for _, asked, _ in series._busy[:]:
                assert asked <= series.now
            series._busy = [(series.now + 1000.0, asked, tokens) for _, asked, tokens in series._busy]
    series.run(meter, 60, ending=cause == "end")
    if cause == "failed":
        series.slots.close()
        meter.look(series.now, {"0": (series.work, series.peak)}, ending=False)
    one = found(meter)
    assert one.share is not None
    assert one.share < 0.95
    assert next(iter(one.missing)) == cause
    assert one.missing[cause] > 0.8 * sum(one.missing.values())
    assert one.now is not None


def test_slow_client_from_the_start_cannot_lower_the_reference() -> None:
    meter, series = Meter(), Series(3)
    series.turn_s = 1.0
    series.run(meter, 300)
    one = found(meter)
    assert one.peak_tokens_per_s >= 0.98 * 16 * SPEED
    assert not one.is_full, "the server was never full, and that is told"
    assert one.share is not None
    assert one.share < 0.85
    assert next(iter(one.missing)) == "client"


def test_server_that_is_away_from_the_start_of_a_life_counts_with_the_peak_of_the_others() -> None:
    meter, series = Meter(), Series(4)
    for second in range(100):
        series._go_on(series.now + 1.0)
        away = Work(away=float(second))
        meter.look(series.now, {"0": (series.work, series.peak), "1": (away, None)}, ending=False)
    one = found(meter)
    assert (one.measured, one.servers) == (1, 2)
    assert one.share == pytest.approx(0.5, abs=0.02)
    assert one.missing["restarts"] == pytest.approx(0.5, abs=0.02)


def test_node_that_comes_anew_begins_its_counters_again() -> None:
    meter = Meter()
    meter.look(0.0, {"0": (Work(served=100.0), None)}, ending=False)
    meter.look(10.0, {"0": (Work(served=110.0), None)}, ending=False)
    meter.look(20.0, {"0": (Work(served=5.0), None)}, ending=False)
    assert meter._sums["0"].work.served == 15.0


def test_pause_of_tokenmill_itself_is_its_own() -> None:
    meter, series = Meter(), Series(5)
    series.run(meter, 100)
    slots = series.slots
    before = slots.work
    pause = 20.0  # no answer is read for so long: all lie there by then
    ended, series._busy = [(asked, tokens) for _, asked, tokens in series._busy], []
    slots.look(pause, 0.25)  # the first look after it, before any answer is read
    series._at(series.now + pause)
    for asked, tokens in ended:
        slots.ends(series.now, asked, lost=False)
        slots.answer(series.now, asked, tokens, 100.0)
        slots.asked -= 1
    slots.look(0.0, 0.25)
    more = slots.work.plus(before, -1)
    assert more.late == pytest.approx(pause - before.spent / before.answers / 2, rel=0.1)
    meter.look(series.now, {"0": (slots.work, series.peak)}, ending=False)
    assert next(iter(found(meter).missing)) == "client"


def test_wait_within_a_pause() -> None:
    assert waited(1.0, 10.0) == 0.5
    assert waited(60.0, 2.0) == 59.0


def test_stretch_that_was_late_or_not_full_counts_only_as_long_as_none_was_better() -> None:
    stretches = Stretches(10.0, 0.0)
    now = all_served = all_late = 0.0

    def fed(tokens: int, served: float, late: float) -> Peak:
        """As much a second of each, for 100 s."""
        nonlocal now, all_served, all_late
        for _ in range(100):
            now, all_served, all_late = now + 1.0, all_served + served, all_late + late
            stretches.note(now, now - 1.0, tokens, 10.0)
            stretches.look(now, 2, all_served, all_late)
        assert stretches.peak is not None
        return stretches.peak

    rough = fed(50, 0.5, 0.0)
    assert not rough.is_full
    assert rough.per_s == pytest.approx(100.0)
    late = fed(36, 1.0, 0.1)
    assert not late.is_full
    assert late.full == pytest.approx(0.9, abs=0.05)
    assert late.per_s == pytest.approx(80.0, rel=0.06), "for a tenth of their time answers lay unread"
    full = fed(39, 0.99, 0.0)
    assert full.full >= FULL
    assert full.per_s == pytest.approx(78.0), "slower, but of a full server"


def test_noise_is_not_chased() -> None:
    chance = random.Random(6)
    stretches = Stretches(30.0, 0.0)
    now = 0.0
    while now < 9_000.0:
        now += 0.25
        stretches.note(now, now - 2.0, round(2.0 * SPEED * chance.gauss(1.0, 0.05)), 10.0)
        stretches.look(now, 8, served=now, late=0.0)
    assert stretches.peak is not None
    assert stretches.peak.per_s == pytest.approx(8 * SPEED, rel=0.015), "the best of 300 stretches"


def test_words_fit_a_line() -> None:
    one = Efficiency(0.9421, 0.98, missing={"client": 0.03, "restarts": 0.02, "queue": 0.0004})
    assert words(one) == "94.2% of the servers' peak, now 98%; missing: tokenmill itself 3.0%, servers away 2.0%"
    assert len(next(of_peak(one))) < 40


def test_slots_that_change_begin_a_stretch_anew() -> None:
    series = Series(7)
    meter = Meter()
    series.run(meter, 20)
    series.width, series.speed = 32, SPEED / 2
    series.run(meter, 25)
    early = series.peak
    series.run(meter, 60)
    late = series.peak
    assert early is None, "neither width was held for long enough"
    assert late is not None
    assert late.width == 32
    assert late.per_s == pytest.approx(32 * SPEED / 2, rel=0.02), "none of it is of the old width"


def test_refusals_are_the_servers() -> None:
    slots = Slots(0.0, 0.0)
    slots.until(1.0, 4, held=False)
    slots.refused = 3
    slots.until(2.0, 4, held=False)
    assert slots.work == Work(idle=1.25, away=0.75)
