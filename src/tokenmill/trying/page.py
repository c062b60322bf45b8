"""What `tune` shows: the plan of it, a table of what was tried, the winner as lines for the config."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import tomli_w
from rich.table import Table

from tokenmill.config import Config
from tokenmill.core import trials
from tokenmill.core.status import Step
from tokenmill.core.trials import Standing
from tokenmill.core.variants import Setup
from tokenmill.masking import mask_args
from tokenmill.plain import duration
from tokenmill.steps import EVERY_S, Tell, Told, step_words
from tokenmill.untrusted import harmless


class Answer(msgspec.Struct, frozen=True):
    """What `--json` prints. `lines` are TOML for the config, empty where nothing is to be changed."""

    winner: str
    verdict: tuple[str, ...]
    lines: str
    tried: tuple[Standing, ...]
    seconds: float
    folder: str


@contextmanager
def spending(tell: Tell, budget_s: float) -> Iterator[Callable[[float, str], None]]:
    """For the scope, how much of the time is spent, and on what: a bar on a terminal, elsewhere a line now and then."""
    due = 0.0

    def at(spent_s: float, doing: str) -> None:
        nonlocal due
        step = Step("tune", round(spent_s), round(budget_s), "s", None, doing)
        if isinstance(tell, Told):
            tell.show(step)
        elif time.monotonic() >= due:
            due = time.monotonic() + EVERY_S
            tell(step_words(step))

    try:
        yield at
    finally:
        if isinstance(tell, Told):
            tell.show(None)


def plan(setups: Sequence[Setup], minutes: float, seconds: float, prompts: int, only: Sequence[str]) -> Iterator[str]:
    """What it will do, before it does."""
    yield f"tune: up to {duration(minutes * 60)}, one server at a time, on {prompts} of this run's prompts"
    yield f"      each is started anew, warmed up, measured for {seconds:.0f} s at least; the best ones again, in turn"
    for number, setup in enumerate(setups, 1):
        yield f"  {number}. {setup.name}{' (the config as it is)' if setup.as_is else ''}"
    if later := [name for name in only if name != "speculation"]:
        yield f"  then, with the fastest of these: {' and '.join(later)}"


def table(found: Sequence[Standing], best: Standing | None) -> Table:
    """A row for each setup, the fastest first; those that did not come up last, with their cause."""
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tok/s", "spread", "× as is", "accept", "at once", "starts"):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("setup", overflow="fold")
    here = next((each for each in found if each.setup.as_is and each.rates), None)
    for each in sorted(found, key=lambda each: -each.rate):
        mark = " ← winner" if best is not None and each.setup == best.setup else ""
        name = f"{each.setup.name}{' (as is)' if each.setup.as_is else ''}{mark}"
        if not each.rates:
            rows.add_row("–", "", "", "", "", "", harmless(f"{name}: {each.failure}"))
            continue
        rows.add_row(
            rate(each.rate),
            f"{rate(each.low)} to {rate(each.high)}",
            trials.times(each, here) if here else "",
            f"{each.accept:.2f}" if each.accept else "",
            str(each.width),
            str(each.lives),
            harmless(name),
        )
    return rows


def rate(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def lines(config: Config, best: Standing) -> str:
    """The winner as TOML for the config, empty where it is the config's own. Secrets are masked."""
    if best.setup.as_is:
        return ""
    found: dict[str, Any] = {}
    if best.setup.args != config.engine.args:
        found["engine"] = {"args": mask_args(best.setup.args)}
    if (concurrency := concurrency_of(config, best)) is not None:
        found["generation"] = {"concurrency": concurrency}
    return tomli_w.dumps(found)


def concurrency_of(config: Config, best: Standing) -> int | None:
    """What generation.concurrency must become; None where it may stay."""
    asked = config.generation.concurrency
    if best.setup.share < 1.0:
        return best.width
    return best.width if isinstance(asked, int) and best.width > asked else None


def whole(config: Config, best: Standing) -> str:
    """The whole config with the winner in it, as TOML: keys that were set, paths absolute, without comments."""
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if not best.setup.as_is:
        data.setdefault("engine", {})["args"] = _plain(best.setup.args)
        if (concurrency := concurrency_of(config, best)) is not None:
            data.setdefault("generation", {})["concurrency"] = concurrency
    head = "# Written by `tokenmill tune`: the config with the fastest setup it found. Comments are not carried over.\n"
    return head + tomli_w.dumps(data)


def _plain(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if value is not None}
