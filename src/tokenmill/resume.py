"""Where an earlier life of the run left off: settings and their guard, the store made whole, the accounts.

Everything that a run counts with comes from here, and from the files alone: nothing of an earlier process is needed.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tokenmill import dataset, plugins, prompts, settings, stage, store
from tokenmill.config import Config, limits_of, rules_of
from tokenmill.core.gate import Gate
from tokenmill.core.judge import Rules
from tokenmill.core.records import NULL
from tokenmill.core.turns import why_broken_off
from tokenmill.engines.base import Engine
from tokenmill.errors import GuardError
from tokenmill.events import EventLog, from_thread
from tokenmill.feed import Begun, Feed
from tokenmill.folder import RunFolder
from tokenmill.launch import engine_version
from tokenmill.ledger import Found, Ledger
from tokenmill.prompts import key_hash
from tokenmill.settings import Settings

TELL_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Accounts:
    """What a run counts with: `row` are its settings, `ledger` what became of every id, `feed` what is still to ask."""

    row: Settings
    rules: Rules
    gate: Gate
    ledger: Ledger
    feed: Feed


async def resume(config: Config, folder: RunFolder, log: EventLog) -> Accounts:
    """Raises GuardError where going on would mix two datasets."""
    told = from_thread(lambda text: log.say("stage", text))
    model = await asyncio.to_thread(stage.resolve, config, told) if config.model.path else None
    engine: Engine = plugins.load("engines", config.engine.kind)()
    row = settings.of(config, model, await asyncio.to_thread(engine_version, config, engine))
    settings.guard(row, settings.read(folder.data))
    log.say("run", f"sampling: {settings.describe(settings.sampling(config, model))}")
    for words in await asyncio.to_thread(store.recover, folder.data):
        log.say("store", words, "warn")
    path = Path(config.prompts.path)
    every_turn = config.generation.turns == "all"
    scan = partial(prompts.scan, path, config.prompts.limit, _counting(log), every_turn=every_turn)
    index = await asyncio.to_thread(scan)
    if index.duplicate_count:
        more = index.duplicate_count - len(index.duplicates)
        words = "; ".join(index.duplicates) + (f"; and {more:,} more" if more else "")
        log.say("prompts", f"{index.duplicate_count:,} rows repeat an id: {words}", "warn")
    rules, gate = rules_of(config), Gate(limits_of(config))
    part, _, of = config.prompts.shard.partition("/")
    ledger = Ledger(index, config.generation.samples, (int(part), int(of)))
    stored = dataset.briefs(folder.data, lambda text: log.say("store", text, "warn"))
    found = await asyncio.to_thread(ledger.load, stored, rules, gate)
    settings.guard_table(found.settings, settings.read(folder.data), folder.data)
    _guard_prompts(found, log)
    feed = Feed(
        path,
        ledger,
        row.id,
        cohort=config.gate.cohort,
        next_cohort=found.cohort + 1,
        dedup=config.prompts.dedup,
        begun=await asyncio.to_thread(_begun, folder.data, ledger, rules),
    )
    gate.expect(0, found.first_cohort + feed.first_cohort_pending)
    counts = ledger.counts()
    done = f", {counts.total - counts.pending:,} of them done" if found.rows else ""
    log.say("run", f"{counts.total:,} completions asked for{done}")
    return Accounts(row, rules, gate, ledger, feed)


def _begun(data: Path, ledger: Ledger, rules: Rules) -> Begun:
    """The conversations that are to be gone on with: no more than had a prompt out when the earlier life ended."""
    wanted = {(int(ledger.index.keys[row]), sample, turn): row for (row, sample), turn in ledger.under_way().items()}
    if not wanted:
        return {}
    found = {}
    for record in dataset.some(data, lambda key, sample, turn: (key_hash(key), sample, turn) in wanted):
        row = wanted[key_hash(record.key), record.sample, record.turn]
        short = replace(record, prompt_ids=NULL, output_ids=NULL)
        found[row, record.sample] = (short, why_broken_off(record, rules))
    return found


def _counting(log: EventLog) -> Callable[[int], None]:
    """Says how far the reading is, every few seconds."""
    last = time.monotonic()

    def told(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_EVERY_S:
            last = time.monotonic()
            log.say("prompts", f"reading prompts: {rows:,} rows so far")

    return told


def _guard_prompts(found: Found, log: EventLog) -> None:
    if found.changed:
        raise GuardError(
            f"the content of {len(found.changed):,} prompts with records has changed: {', '.join(found.changed[:5])}",
            fix="bring the old prompt file back, or begin a new run: another name in the config",
        )
    if found.strangers:
        log.say("store", f"{found.strangers:,} records belong to prompts not asked for now; they are kept", "warn")
