"""Where an earlier life of the run left off: settings and their guard, the store made whole, the accounts.

Everything that a run counts with comes from here, and from the files alone: nothing of an earlier process is needed.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tokenmill import dataset, plugins, prompts, settings, stage, store
from tokenmill.config import Config, limits_of, rules_of
from tokenmill.core.gate import Gate
from tokenmill.core.judge import Rules
from tokenmill.engines.base import Engine
from tokenmill.errors import GuardError
from tokenmill.events import EventLog
from tokenmill.feed import Feed
from tokenmill.folder import RunFolder
from tokenmill.launch import engine_version
from tokenmill.ledger import Found, Ledger
from tokenmill.settings import Settings
from tokenmill.steps import Meter, Tell, counted


@dataclass(frozen=True, slots=True)
class Accounts:
    """What a run counts with: `row` are its settings, `ledger` what became of every id, `feed` what is still to ask."""

    row: Settings
    rules: Rules
    gate: Gate
    ledger: Ledger
    feed: Feed


async def resume(config: Config, folder: RunFolder, log: EventLog, told: Tell) -> Accounts:
    """`told` may be told from any thread. Raises GuardError where going on would mix two datasets."""
    model = await asyncio.to_thread(stage.resolve, config, told) if config.model.path else None
    engine: Engine = plugins.load("engines", config.engine.kind)()
    row = settings.of(config, model, await asyncio.to_thread(engine_version, config, engine))
    settings.guard(row, settings.read(folder.data))
    log.say("run", f"sampling: {settings.describe(settings.sampling(config, model))}")
    for words in await asyncio.to_thread(store.recover, folder.data):
        log.say("store", words, "warn")
    path = Path(config.prompts.path)
    with Meter(told, "reading prompts:", total=config.prompts.limit, unit="rows") as meter:
        index = await asyncio.to_thread(prompts.scan, path, config.prompts.limit, meter.at)
    if index.duplicate_count:
        more = index.duplicate_count - len(index.duplicates)
        words = "; ".join(index.duplicates) + (f"; and {more:,} more" if more else "")
        log.say("prompts", f"{index.duplicate_count:,} rows repeat an id, and are called id~2, id~3 …: {words}", "warn")
    rules, gate = rules_of(config), Gate(limits_of(config))
    part, _, of = config.prompts.shard.partition("/")
    ledger = Ledger(index, config.generation.samples, (int(part), int(of)))
    stored = dataset.briefs(folder.data, lambda text: log.say("store", text, "warn"))
    found = await asyncio.to_thread(ledger.load, counted(stored, told, "reading what is stored:"), rules, gate)
    settings.guard_table(found.settings, settings.read(folder.data), folder.data)
    _guard_prompts(found, log)
    feed = Feed(
        path, ledger, row.id, cohort=config.gate.cohort, next_cohort=found.cohort + 1, dedup=config.prompts.dedup
    )
    gate.expect(0, found.first_cohort + feed.first_cohort_pending)
    counts = ledger.counts()
    done = f", {counts.done:,} of them done" if found.rows else ""
    log.say("run", f"{counts.total:,} completions asked for{done}")
    return Accounts(row, rules, gate, ledger, feed)


def _guard_prompts(found: Found, log: EventLog) -> None:
    if found.changed:
        raise GuardError(
            f"the content of {len(found.changed):,} prompts with records has changed: {', '.join(found.changed[:5])}",
            fix="bring the old prompt file back, or begin a new run: another name in the config",
        )
    if found.strangers:
        log.say(
            "store", f"{found.strangers:,} records belong to prompts that are not asked for now; they are kept", "warn"
        )
