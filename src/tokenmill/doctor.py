"""All that would make a run fail, before it costs anything: runs the checks, and refuses a run that one of them fails.

`fail` only where the run could not start, would store wrong data or would fill a disk; all else is `warn` (the table is
docs/doctor.md). What cannot be read is `unknown`, never `ok`. Nothing is changed and no model is loaded.

A check may hang for ever, on a mount that does not answer or a driver that does not. So each runs on a thread that
nobody waits for beyond its time: the next one begins when it has ended or is slow, and all of them share one deadline.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

from tokenmill.checks.base import Context, Finding, Level
from tokenmill.checks.capacity import check_capacity
from tokenmill.checks.draft import check_draft
from tokenmill.checks.engine import check_engine
from tokenmill.checks.gpus import check_gpus
from tokenmill.checks.model import check_model
from tokenmill.checks.notify import check_notify
from tokenmill.checks.output import check_output
from tokenmill.checks.places import check_places
from tokenmill.checks.ports import check_ports
from tokenmill.checks.prompts import check_prompts
from tokenmill.checks.room import check_room
from tokenmill.config import Config
from tokenmill.errors import PreflightError, TokenmillError, UsageError, boundary
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.steps import Meter, Tell

Check = Callable[[Context], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "places": check_places,  # first: it measures, and nothing else runs beside it yet
    "model": check_model,
    "draft": check_draft,
    "output": check_output,
    "room": check_room,
    "engine": check_engine,
    "gpus": check_gpus,
    "ports": check_ports,
    "notify": check_notify,
    "capacity": check_capacity,
    "prompts": check_prompts,  # last: it loads a tokenizer
}

RUN_CHECKS = ("output", "notify", "prompts")
"""What a run asks of its own machine where its nodes are elsewhere; they ask everything else, each of its own."""

NODE_CHECKS = {name: check for name, check in CHECKS.items() if name not in RUN_CHECKS}

DEADLINE_S = 20.0
"""For all checks together: what takes longer is told as slow, and is not waited for."""

TURN_S = 1.5
"""After this the next check begins beside a slow one: all of them get to begin before the deadline."""

SLOW_S = 5.0
"""A check that took this is told, with its time: on a local machine the slowest takes 3 s, the probe's limit."""


class _Running:
    """One check on its thread; `findings` may grow until `done`."""

    def __init__(self, name: str, check: Check, context: Context) -> None:
        self.name = name
        self.findings: list[Finding] = []
        self.seconds = 0.0
        self.done = threading.Event()
        self._check, self._context = check, context
        self._began = time.monotonic()
        threading.Thread(target=self._run, name=f"doctor {name}", daemon=True).start()

    def _run(self) -> None:
        try:
            with boundary(f"the check {self.name}"):
                self.findings.extend(self._check(self._context))
        except (PreflightError, UsageError) as error:
            self.findings.append(Finding(self.name, "fail", "", str(error), error.fix))
        except TokenmillError as error:
            self.findings.append(Finding(self.name, "unknown", "", str(error), error.fix))
        finally:
            self.seconds = time.monotonic() - self._began
            self.done.set()

    def told(self) -> list[Finding]:
        """What it found so far, and that it is slow, if it is."""
        found = list(self.findings)
        if not self.done.is_set():
            waited = time.monotonic() - self._began
            words = f"the check {self.name} is slow: it has not ended after {waited:.0f} s, and is not waited for"
            found.append(Finding(self.name, "unknown", "", words, f"--skip {self.name}", {"seconds": waited}))
        elif self.seconds > SLOW_S:
            words = f"the check {self.name} is slow: it took {self.seconds:.0f} s"
            found.append(Finding(self.name, "ok", "", words, values={"seconds": self.seconds}))
        return found


def examine(
    context: Context,
    skip: tuple[str, ...] = (),
    *,
    checks: dict[str, Check] | None = None,
    deadline_s: float = DEADLINE_S,
    tell: Tell = lambda text: None,
) -> list[Finding]:
    """All findings, check by check; a check that is skipped leaves none. Returns within the deadline."""
    wanted = CHECKS if checks is None else checks
    if strange := [name for name in skip if name not in CHECKS]:
        raise UsageError(f"--skip {strange[0]}: there is no such check", fix=f"one of {', '.join(CHECKS)}")
    end = time.monotonic() + deadline_s
    turn_s = min(TURN_S, deadline_s / max(1, len(wanted)))
    begun: list[_Running] = []
    with Meter(tell, "doctor:", total=len(wanted), unit="checks") as meter:
        for name, check in wanted.items():
            if name not in skip:
                meter.at(sum(running.done.is_set() for running in begun), name)
                begun.append(_Running(name, check, context))
                begun[-1].done.wait(turn_s)
        for running in begun:
            meter.at(sum(other.done.is_set() for other in begun), running.name)
            running.done.wait(max(0.0, end - time.monotonic()))
    return [finding for running in begun for finding in running.told()]


ORDER: tuple[Level, ...] = ("ok", "unknown", "warn", "fail")
"""How findings are shown: what stops a run stands last, where the eye is."""


def shown(findings: list[Finding]) -> Iterator[str]:
    """The findings as text: by level, then by check, each with its fix."""
    for level in ORDER:
        for finding in (finding for finding in findings if finding.level == level):
            yield f"{finding.level:8}{finding.check:9}{finding.text}"
            if finding.fix and level != "ok":
                yield f"{'':17}fix: {finding.fix}"


def checks_of(config: Config) -> dict[str, Check]:
    """What is asked of the machine that a run is started on."""
    return CHECKS if config.fleet.cluster == "local" else {name: CHECKS[name] for name in RUN_CHECKS}


def refuse(findings: list[Finding]) -> None:
    """Raises PreflightError with every `fail`, each with its fix."""
    failures = [finding for finding in findings if finding.level == "fail"]
    if failures:
        words = [f"{f.check}: {f.text}" + (f"\n      fix: {f.fix}" if f.fix else "") for f in failures]
        raise PreflightError("the run cannot start:\n  " + "\n  ".join(words))


async def preflight(
    config: Config,
    folder: RunFolder,
    living: list[ServerEntry],
    log: EventLog,
    skip: tuple[str, ...] = (),
    tell: Tell = lambda text: None,
) -> None:
    """The doctor's findings, told; raises PreflightError where one of them is a `fail`."""
    context = Context(config, folder, living, thorough=False)
    findings = await asyncio.to_thread(examine, context, skip, checks=checks_of(config), tell=tell)
    for finding in findings:
        if finding.level in ("warn", "unknown"):
            log.say("doctor", f"{finding.check}: {finding.text}", "warn", finding.fix)
    refuse(findings)
