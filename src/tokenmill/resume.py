"""Where an earlier life of the run left off: settings and their guard, the store made whole, the accounts.

Everything that a run counts with comes from here, and from the files alone: nothing of an earlier process is needed.
"""

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from tokenmill import asked, dataset, plugins, prompts, retry, settings, stage, store
from tokenmill.config import Config, limits_of, rules_of
from tokenmill.core.gate import Gate
from tokenmill.core.judge import Rules
from tokenmill.core.records import Record
from tokenmill.core.turns import why_broken_off
from tokenmill.engines.base import Engine
from tokenmill.errors import GuardError
from tokenmill.events import EventLog
from tokenmill.feed import Begun, Feed
from tokenmill.folder import RunFolder
from tokenmill.launch import engine_version
from tokenmill.ledger import Found, Ledger
from tokenmill.prompts import key_hash
from tokenmill.retry import Retry
from tokenmill.settings import Settings
from tokenmill.steps import Meter, Tell, counted


@dataclass(frozen=True, slots=True)
class Accounts:
    """What a run counts with: `row` are its settings, `ledger` what became of every id, `feed` what is still to ask.

    `retry` is what is asked for a second time, None where the run itself goes on.
    """

    row: Settings
    rules: Rules
    gate: Gate
    ledger: Ledger
    feed: Feed
    retry: Retry | None = None


async def resume(config: Config, folder: RunFolder, log: EventLog, told: Tell, words: tuple[str, ...] = ()) -> Accounts:
    """`told` may be told from any thread; `words` are those of --retry, none for the run itself.

    Raises GuardError where going on would mix two datasets."""
    model = await asyncio.to_thread(stage.resolve, config, told) if config.model.path else None
    engine: Engine = plugins.load("engines", config.engine.kind)()
    version = await asyncio.to_thread(engine_version, config, engine)
    row = await asyncio.to_thread(settings.of, config, model, version)
    recorded = settings.read(folder.data)
    row, again = retry.begin(row, words, recorded) if words else (row, None)
    settings.guard(row, recorded)
    log.say("run", f"sampling: {settings.describe(settings.sampling(config, model))}")
    for told_of in await asyncio.to_thread(store.recover, folder.data):
        log.say("store", told_of, "warn")
    path = Path(config.prompts.path)
    every_turn = config.generation.turns == "all"
    with Meter(told, "reading prompts:", total=config.prompts.limit, unit="rows") as meter:
        scan = partial(prompts.scan, path, config.prompts.limit, meter.at, every_turn=every_turn)
        index = await asyncio.to_thread(scan)
    if index.duplicate_count:
        more = index.duplicate_count - len(index.duplicates)
        some = "; ".join(index.duplicates) + (f"; and {more:,} more" if more else "")
        log.say("prompts", f"{index.duplicate_count:,} rows repeat an id, and are called id~2, id~3 …: {some}", "warn")
    rules, gate = rules_of(config), Gate(limits_of(config))
    part, _, of = config.prompts.shard.partition("/")
    ledger = Ledger(index, config.generation.samples, (int(part), int(of)), again)
    stored = dataset.newest_first(folder.data, dataset.Counted, lambda text: log.say("store", text, "warn"))
    found = await asyncio.to_thread(ledger.load, counted(stored, told, "reading what is stored:"), rules, gate)
    settings.guard_table(found.settings, recorded, folder.data)
    _guard_prompts(found, log)
    if again is None:  # what a retry finds, such as a file that has grown, the run was not asked for
        await asyncio.to_thread(asked.keep, folder.data, asked.of(index, ledger, (int(part), int(of))))
    feed = Feed(
        path,
        ledger,
        row.id,
        cohort=config.gate.cohort,
        held=found.cohorts,
        dedup=config.prompts.dedup,
        begun=await asyncio.to_thread(_begun, folder.data, ledger, rules) if again is None else None,
        before=await asyncio.to_thread(_before, folder.data, ledger),
    )
    gate.expect(0, found.cohorts[0] + feed.first_cohort_pending)
    _tell(ledger, found, row, recorded, log)
    return Accounts(row, rules, gate, ledger, feed, again)


def _tell(ledger: Ledger, found: Found, row: Settings, recorded: list[Settings], log: EventLog) -> None:
    """What is asked for, and what of it is done; a retry that was cut short is named, whatever is asked for now."""
    counts, last = ledger.counts(), retry.unfinished(recorded)
    if row.retry:
        what = f"retry {row.retry} ({', '.join(row.labels)})"
        done = f", {found.redone:,} are made again already" if found.redone else ""
        log.say("retry", f"{what}: {ledger.left:,} completions once more{done}")
        if ledger.left and retry.is_in_vain(row, recorded):
            words = "sampling and seed are those of the older records: servers will mostly write the same again"
            log.say("retry", words, "warn", "--set generation.seed=…, or another temperature or max_tokens")
    else:
        done = f", {counts.done:,} of them done" if found.rows else ""
        whole = len(ledger.index) * ledger.samples
        part = f" (this shard's of {whole:,})" if counts.total < whole else ""
        log.say("run", f"{counts.total:,} completions asked for{part}{done}")
    if last is not None and last.retry != row.retry:
        words = f"retry {last.retry} ({', '.join(last.labels)}) was cut short; the older records go on counting"
        log.say("retry", words, "warn", f"tokenmill run CONFIG {retry.flags(last, recorded)}   goes on with it")


def _begun(data: Path, ledger: Ledger, rules: Rules) -> Begun:
    """The conversations that are to be gone on with: no more than had a prompt out when the earlier life ended."""
    wanted = {(int(ledger.index.keys[row]), sample, turn): row for (row, sample), turn in ledger.under_way().items()}
    if not wanted:
        return {}
    found = {}
    for record in dataset.picked(
        data, lambda key, sample, turn: (key_hash(key), sample, turn) in wanted, with_ids=False
    ).values():
        row = wanted[key_hash(record.key), record.sample, record.turn]
        found[row, record.sample] = (record, why_broken_off(record, rules))
    return found


def _before(data: Path, ledger: Ledger) -> dict[tuple[int, int, int], Record]:
    """The older records of later turns that a retry asks for: with what each was asked."""
    wanted = {(int(ledger.index.keys[row]), sample, turn): row for row, sample, turn in ledger.later_turns_again()}
    if not wanted:
        return {}
    found = dataset.picked(data, lambda key, sample, turn: (key_hash(key), sample, turn) in wanted, with_ids=False)
    return {
        (wanted[key_hash(old.key), old.sample, old.turn], old.sample, old.turn): replace(old, text="")
        for old in found.values()
    }


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
