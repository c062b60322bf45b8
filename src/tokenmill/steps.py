"""Long steps and how far they are: a bar with its rate on a terminal, a line now and then elsewhere.

What takes long takes a `tell`, to which it says sentences. One line tells how far it is, too:

    for record in counted(records, tell, "reading", total=count): …      or      meter.at(done)

A command hands in `with shown() as tell`; a run hands in a `Told` that shows the step with its status.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from tokenmill.core.status import NodeRow, Step
from tokenmill.plain import duration, gigabytes, speed
from tokenmill.untrusted import harmless

if TYPE_CHECKING:
    from rich.progress import Progress

Tell = Callable[[str], None]

LOOK_S = 0.2
"""Between two pictures of a bar."""

MANY = 64
"""From so many items on, one in so many looks at the clock: a million looks would take 0.4 s."""

AFTER_S, EVERY_S = 2.0, 10.0
"""Lines: the first one after so long, since what is over by then needs none; then not to fill a screen."""

WINDOW_S = 10.0
"""The rate is of the last seconds: a mount's first seconds say little about its last."""

BAR = 30

Item = TypeVar("Item")


class Told:
    """A `tell` that can also show a step that goes on, None once it has ended. Both may be called from any thread."""

    def __init__(self, say: Tell) -> None:
        self.step: Step | None = None
        self._say = say

    def __call__(self, text: str) -> None:
        self._say(text)

    def show(self, step: Step | None) -> None:
        self.step = step


class _Barred(Told):
    """With a bar below what is said."""

    def __init__(self, say: Tell, bars: "Progress") -> None:
        super().__init__(say)
        self._bars = bars
        self._bar = bars.add_task("", visible=False)

    def show(self, step: Step | None) -> None:
        if step is None:
            self._bars.reset(self._bar, visible=False)
        else:
            words, total = step_words(step), step.total or None
            self._bars.update(self._bar, total=total, completed=step.done, description=words, visible=True)


class Meter:
    """How far one step is. `total` 0: nobody knows how much it will be; `start` was there before, and is in no rate."""

    def __init__(
        self,
        tell: Tell,
        what: str,
        *,
        total: int = 0,
        unit: str = "bytes",
        start: int = 0,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell, self._what, self._total, self._unit, self._clock = tell, what, total, unit, clock
        self._show = tell.show if isinstance(tell, Told) else None
        began = clock()
        self._seen: deque[tuple[float, int]] = deque([(began, start)])
        self._every_s = every_s
        self._looked, self._due = began - LOOK_S, began + min(AFTER_S, every_s)

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._show is not None:
            self._show(None)

    @property
    def due(self) -> bool:
        """Whether the next `at` is shown: for notes that cost something."""
        return self._clock() >= (self._due if self._show is None else self._looked + LOOK_S)

    def at(self, done: int, note: str = "", *, total: int = 0) -> None:
        """So much is done; may be called as often as one likes."""
        if not self.due:
            return
        self._looked = moment = self._clock()
        self._seen.append((moment, done))
        while len(self._seen) > 2 and moment - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        start, first = self._seen[0]
        rate = max(0.0, (done - first) / (moment - start)) if moment - start >= 1.0 else None
        step = Step(self._what, done, total or self._total, self._unit, rate, note)
        if self._show is not None:
            self._show(step)
        else:
            self._due = moment + self._every_s
            self._tell(step_words(step))


def counted(
    items: Iterable[Item],
    tell: Tell,
    what: str,
    *,
    total: int = 0,
    unit: str = "records",
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """The items as they are; `tell` hears how many have passed."""
    with Meter(tell, what, total=total, unit=unit, clock=clock) as meter:
        for number, item in enumerate(items, 1):
            yield item
            if number < MANY or number % MANY == 0:
                meter.at(number)


def step_words(step: Step) -> str:
    """A step in words: how far, how fast, how long still."""
    if step.unit == "bytes":
        done, rate = gigabytes(step.done), speed(step.per_s or 0.0)
        done += f" of {gigabytes(step.total)}" if step.total else ""
    else:
        done = f"{step.done:,} of {step.total:,} {step.unit}" if step.total else f"{step.done:,} {step.unit}"
        rate = f"{step.per_s or 0.0:,.{0 if (step.per_s or 0.0) >= 10 else 1}f} {step.unit}/s"
    words = [f"{step.what} {done}"]
    if step.per_s is not None:
        words.append(rate)
    if step.per_s and step.total > step.done:
        words.append(f"{duration((step.total - step.done) / step.per_s)} to go")
    return harmless(", ".join([*words, step.note] if step.note else words))


def node_words(node: NodeRow) -> str:
    """What is to be said of a node beside its numbers: why it is so, what it stages, what its doctor found; else what
    it is made of."""
    count = len(node.findings)
    found = f"doctor: {count} finding{'s' * (count > 1)}" if count else ""
    words = [node.note, step_words(node.step) if node.step else "", found, "" if node.note else node.made_of]
    return harmless("; ".join(filter(None, words)))


@contextmanager
def shown() -> Iterator[Tell]:
    """For a command's scope: sentences and steps on stderr. A bar goes when its step ends; sentences stay."""
    from rich.progress import BarColumn, Progress, TextColumn  # here: a sealing process has no use for them
    from rich.table import Column
    from rich.text import Text

    from tokenmill.streams import console, in_front, live, stoppable

    out = console()
    if not live(out):
        yield lambda text: out.print(Text(harmless(text, lines=True)), soft_wrap=True)
        return
    words = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    bars = Progress(BarColumn(BAR), words, console=out, transient=True)
    with bars, stoppable(bars.stop, lambda: bars.start() if in_front(out) else None):
        yield _Barred(lambda text: out.print(Text(harmless(text, lines=True))), bars)
