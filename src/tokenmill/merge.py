"""Shards → one run folder, which every command takes for a run: proved first, then put together aside, and re-read.

Sealed parts are linked, or copied where they lie on another disk; open journals are sealed on the way. The runs stay as
they are. Whatever kills it leaves no folder under the new name, and the next merge to it clears away what is left.
"""

import errno
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import tomli_w
from msgspec.structs import replace

from tokenmill import asked, configfile, dataset, outfolder, report, seal, settings, shards, store
from tokenmill.backup import layout
from tokenmill.config import Config, rules_of, shown
from tokenmill.core import judge
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.status import PromptCounts, RunStatus
from tokenmill.errors import StoreError, UsageError
from tokenmill.events import EventLog, now
from tokenmill.folder import RunFolder
from tokenmill.servers import folder_of
from tokenmill.settings import Settings
from tokenmill.shards import Shard, Stored
from tokenmill.steps import Meter, Tell, counted

UNLINKABLE = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES})
"""How the system says that a file cannot have a second name there: it is copied."""


class Part(msgspec.Struct, frozen=True):
    """What one run gave: `completions` are ids, `superseded` the older rows of some of them."""

    run: str
    shard: str
    completions: int
    superseded: int


class Merged(msgspec.Struct, frozen=True):
    """`keys` of the prompt set, each in exactly one of the runs; `differs`: what is unlike between them, and may be."""

    out: str
    runs: list[Part]
    keys: int
    prompts: PromptCounts
    superseded: int
    differs: list[str]


def merge(paths: Sequence[Path], out: Path, tell: Tell) -> Merged:
    """Makes the run folder `out`; the runs may be named by their folders or configs.

    Raises UsageError (a run in use, a shard missing or given twice, `out` there already), GuardError (runs that would
    make no one dataset), StoreError.
    """
    if out.exists():
        raise UsageError(f"{out} exists already", fix="name a new folder, or remove it")
    out = out.absolute()
    configfile.validate({"name": out.name, "engine": {"kind": "fake"}, "prompts": {"path": "-"}}, f"the name of {out}")
    with ExitStack() as held:
        opened = []
        for folder in _folders(paths):
            held.enter_context(folder.still())
            opened.append(shards.opened(folder))
        differs = shards.compare(opened)
        shards.check_numbers(opened)
        for line in differs:
            tell(f"differs, and may: {line}")
        with Meter(tell, "reading", total=sum(shard.asked.completions for shard in opened), unit="rows") as meter:
            stored = shards.prove(opened, meter.at)
        config = _config(opened[0].config, out)
        with outfolder.made(out) as aside:
            counts = _build(RunFolder(aside), config, opened, stored, tell)
    tell("the report is written")
    report.write(RunFolder(out), report.Ending("done", counts.total), tell)
    return Merged(str(out), _parts(opened, stored), opened[0].asked.rows, counts, sum(stored.superseded), differs)


def _folders(paths: Sequence[Path]) -> list[RunFolder]:
    found = [folder_of(path) for path in paths]
    for where, count in Counter(folder.path.resolve() for folder in found).items():
        if count > 1:
            raise UsageError(f"{where} is given {count} times", fix="name one run of each shard")
    return found


def lines(merged: Merged) -> list[str]:
    """The proof, for a person."""
    counts = merged.prompts
    rows = [
        f"{part.run}: shard {part.shard}, {part.completions:,} completions"
        + (f", {part.superseded:,} older rows" if part.superseded else "")
        for part in merged.runs
    ]
    return [
        *rows,
        f"every key once: {merged.keys:,} keys, {counts.total:,} completions; {counts.verdicts}",
        f"{merged.out}",
    ]


def _parts(opened: Sequence[Shard], stored: Stored) -> list[Part]:
    return [
        Part(str(shard.folder.path), "{}/{}".format(*shard.asked.shard), shard.asked.completions, superseded)
        for shard, superseded in zip(opened, stored.superseded, strict=True)
    ]


def _config(first: Config, out: Path) -> Config:
    """The first run's, for the whole prompt set. A copy of its shard is no copy of this."""
    return first.model_copy(
        update={
            "name": out.name,
            "output": first.output.model_copy(update={"dir": str(out.parent), "copy_to": ""}),
            "prompts": first.prompts.model_copy(update={"shard": "0/1"}),
        }
    )


# -- the folder --------------------------------------------------------------------------------------------------------
def _build(folder: RunFolder, config: Config, opened: Sequence[Shard], stored: Stored, tell: Tell) -> PromptCounts:
    """Everything but the report; raises StoreError where what was put there does not read back."""
    with folder.own("merge"):
        log = EventLog(folder.events)
        folder.write_config(tomli_w.dumps(shown(config)))
        _gather(folder, opened, tell)
        settings.write(folder.data, _union(opened))
        completions = sum(shard.asked.completions for shard in opened)
        asked.keep(folder.data, replace(opened[0].asked, shard=(0, 1), completions=completions))
        counts, labels, tokens = _read_back(folder, rules_of(config), sum(stored.rows), completions, tell)
        for part in _parts(opened, stored):
            log.say("merge", f"shard {part.shard} of {part.run}: {part.completions:,} completions")
        status = RunStatus(config.name, "done", counts, (), 0.0, None, None, tokens, labels=labels, updated=now())
        folder.write_status(status)
        return counts


def _gather(folder: RunFolder, opened: Sequence[Shard], tell: Tell) -> None:
    """All data files under new numbers; those of one run in their order, since of one id the newest file counts."""
    files = [file for shard in opened for file in shard.files]
    for number, file in enumerate(counted(files, tell, "gathering", total=len(files), unit="files"), 1):
        target = folder.data / f"{file.name.partition('-')[0]}-{number:06d}{file.suffix}"
        _link(file, target)
        if file.suffix == ".jsonl":
            seal.seal(target, store.part_of(target))


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError as error:
        if error.errno not in UNLINKABLE:
            raise
        with file.open("rb") as source:
            content = layout.chunks(source.fileno(), 0, os.fstat(source.fileno()).st_size)
            layout.put(target, content, lambda: None)


def _union(opened: Sequence[Shard]) -> list[Settings]:
    """Every row once. A retry that was cut short in one run is cut short in all."""
    rows: dict[str, Settings] = {}
    for row in (row for shard in opened for row in shard.settings):
        known = rows.setdefault(row.id, row)
        rows[row.id] = replace(known, ended=known.ended and row.ended)
    return list(rows.values())


def _read_back(
    folder: RunFolder, rules: Rules, rows: int, completions: int, tell: Tell
) -> tuple[PromptCounts, dict[str, int], int]:
    """Counts what stands there now, by verdict, with labels and tokens; what counts must be what was proved."""
    verdicts: Counter[Verdict] = Counter()
    labels: Counter[str] = Counter()
    tokens = 0
    briefs = dataset.current(folder.data, dataset.Brief)
    for brief in counted(briefs, tell, "reading back", total=completions):
        verdict, found = judge.judged(brief, rules)
        verdicts[verdict] += 1
        labels.update(found)
        tokens += brief.output_tokens
    there = sum(map(seal.rows_of, store.parts(folder.data)))
    if there != rows or verdicts.total() != completions:
        words = f"{rows:,} rows of {completions:,} completions were gathered"
        raise StoreError(f"{words}, and {there:,} of {verdicts.total():,} are there")
    counts = (verdicts[verdict] for verdict in (Verdict.ACCEPTED, Verdict.REJECTED, Verdict.FAILED))
    return PromptCounts(completions, *counts), dict(labels), tokens
