"""All that would make a run fail, before it costs anything: runs the checks, and refuses a run that one of them fails.

`fail` only where the run could not start, would store wrong data or would fill a disk; all else is `warn`. What cannot
be read is `unknown`, never `ok`. Nothing is changed and no model is loaded.
"""

import asyncio
from collections.abc import Callable, Iterator

from tokenmill.checks.base import Context, Finding
from tokenmill.checks.capacity import check_capacity
from tokenmill.checks.engine import check_engine
from tokenmill.checks.gpus import check_gpus
from tokenmill.checks.model import check_model
from tokenmill.checks.output import check_output
from tokenmill.checks.ports import check_ports
from tokenmill.checks.prompts import check_prompts
from tokenmill.config import Config
from tokenmill.errors import PreflightError, UsageError
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder, ServerEntry

CHECKS: dict[str, Callable[[Context], Iterator[Finding]]] = {
    "prompts": check_prompts,
    "model": check_model,
    "output": check_output,
    "engine": check_engine,
    "gpus": check_gpus,
    "ports": check_ports,
    "capacity": check_capacity,
}


def examine(context: Context, skip: tuple[str, ...] = ()) -> list[Finding]:
    """All findings, check by check; a check that is skipped leaves none."""
    if unknown := set(skip) - CHECKS.keys():
        raise UsageError(f"--skip {', '.join(sorted(unknown))}: no such check; there are: {', '.join(CHECKS)}")
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        if name in skip:
            continue
        try:
            findings += check(context)
        except (PreflightError, UsageError) as error:
            findings.append(Finding(name, "fail", "", str(error), error.fix))
    return findings


def refuse(findings: list[Finding]) -> None:
    """Raises PreflightError with every `fail`, each with its fix."""
    failures = [finding for finding in findings if finding.level == "fail"]
    if failures:
        words = [f"{f.check}: {f.message}" + (f"\n      fix: {f.fix}" if f.fix else "") for f in failures]
        raise PreflightError("the run cannot start:\n  " + "\n  ".join(words))


async def preflight(
    config: Config, folder: RunFolder, living: list[ServerEntry], log: EventLog, skip: tuple[str, ...] = ()
) -> None:
    """The doctor's findings, told; raises PreflightError where one of them is a `fail`."""
    findings = await asyncio.to_thread(examine, Context(config, folder, living), skip)
    for finding in findings:
        if finding.level in ("warn", "unknown"):
            log.say("doctor", f"{finding.check}: {finding.message}", "warn", finding.fix)
    refuse(findings)
