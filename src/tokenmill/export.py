"""Records → a dataset in a format: what the sieve lets through, in the prompts' order. It is there whole or not at all:
written aside, re-read and counted, synced, renamed.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from tokenmill import card, dataset, outfolder, plugins, settings
from tokenmill.configfile import load
from tokenmill.core.judge import GROUPS, Rules
from tokenmill.core.records import NULL, Label, Record
from tokenmill.errors import StoreError, UsageError
from tokenmill.folder import RunFolder
from tokenmill.formats.base import CUT, SPLITS, Format, Split
from tokenmill.sieve import Choice, Sieve, Tally, split_of
from tokenmill.steps import Tell, counted
from tokenmill.tokens.filling import Filling

MANY = 100_000
"""Rows whose reading back takes so long that it is told."""

ALL = Choice()
"""All accepted records, as they are."""


def chosen(
    *,
    drop: str = "",
    cap: Sequence[str] = (),
    min_tokens: int = 0,
    max_tokens: int = 0,
    max_length: int = 0,
    dedup: bool = False,
    validation: float = 0.0,
) -> Choice:
    """The command line's words as a choice; raises UsageError for what it cannot mean."""
    known = {*get_args(Label), *GROUPS}
    dropped = frozenset(name.strip() for name in drop.split(",") if name.strip())
    caps: dict[str, float] = {}
    for word in cap:
        name, _, value = word.partition("=")
        try:
            caps[name] = float(value)
        except ValueError:
            raise UsageError(f"--cap {word!r} is not LABEL=SHARE", fix="--cap truncated=0.1") from None
    if unknown := sorted({*dropped, *caps} - known):
        raise UsageError(f"no label named {', '.join(unknown)}", fix=f"one of: {', '.join(sorted(known))}")
    for what, share in (("--validation", validation), *((f"--cap {name}", share) for name, share in caps.items())):
        if not 0 <= share < 1:
            raise UsageError(f"{what}: {share:g} is no share", fix="from 0 to less than 1, such as 0.1 for a tenth")
    return Choice(dropped, caps, min_tokens, max_tokens, max_length, dedup, validation)


def export(
    folder: RunFolder,
    name: str,
    out: Path,
    rules: Rules,
    *,
    samples: int,
    turns: str = "last",
    choice: Choice = ALL,
    model: Path | None = None,
    filling: Filling | None = None,
    tell: Tell = lambda text: None,
) -> int:
    """Writes a run's accepted records to the folder `out`, which must not exist yet; returns their number.

    `model` is read for the card, if it is still there. `filling` gives ids to rows that have none. `tell` hears how far
    it is, and at the end what went out and what did not. Raises GateError where too many rows are faulty, or none is
    left.
    """
    kind: type[Format] = plugins.load("formats", name)
    if choice.length and not kind.needs_ids:
        fix = "leave --max-length out, or bound its rows by --max-tokens"
        raise UsageError(f"{name} holds text, and only token ids can be cut at a length", fix=fix)
    if out.resolve().is_relative_to(folder.data.resolve()):
        raise UsageError(f"{out} lies where the run keeps its records", fix=f"another place, such as {name}-1")
    if filling is not None and not kind.needs_ids:
        raise UsageError(f"{name} holds text, and needs no token ids", fix="leave --retokenise out")

    def stored(done: str) -> Iterator[Record]:
        found = counted(dataset.records(folder.data), tell, done)
        return found if filling is None else filling.fill(found)

    with outfolder.made(out) as aside:
        several = samples > 1 or turns == "all" or _several(folder)
        made = settings.read(folder.data)
        form = kind(several=several, settings={row.id: row for row in made})
        form.tells_source = filling is not None
        sieve, tally = Sieve(form, rules, choice), Tally(form)
        if choice.caps:
            sieve.survey(stored("looked at"))
        rows = _write(sieve, tally, stored("read"), aside)
        tally.gate(sieve)
        if tally.rows >= MANY:
            tell(f"{tally.rows:,} rows written, to be read back")
        _verify(form, rows, aside)
        notes = filling.words() if filling is not None else []
        page = card.page(out.name, form, made, rows, sieve, tally, model, notes)
        (aside / "README.md").write_text(page, encoding="utf-8", errors="replace")
    for line in (*summary(form, rows, sieve, tally), *(f"  {words}" for words in notes)):
        tell(line)
    return tally.rows


def _several(folder: RunFolder) -> bool:
    return any(brief.sample or brief.turn for brief in dataset.briefs(folder.data))


def suggestion(folder: RunFolder) -> str:
    """The command that a finished run's data is best taken out with: as ids for a drafter, as conversations where the
    engine gave none, as text for fine-tuning."""
    drafter = not folder.config.exists() or load(folder.config).judge.purpose == "drafter"
    made = dataset.completion(folder.data)
    has_ids = made is None or made.output_ids != NULL
    form = "messages" if not drafter else "specforge" if has_ids else "specforge-chat"
    return shlex.join(["tokenmill", "export", str(folder.path), form, "OUT"])


def _write(sieve: Sieve, tally: Tally, records: Iterable[Record], aside: Path) -> dict[Split, int]:
    """Writes all splits in one reading; the rows of validation wait in a file of their own meanwhile."""
    form, share = sieve.form, sieve.choice.validation
    with _Spool(aside / ".validation") as held, _Spool(aside / ".failures") as failures:

        def train() -> Iterator[Record]:
            for record in sieve.sieve(records, failures.add if form.keeps_failures else None):
                split = split_of(record.key, share) if share else "train"
                tally.add(record, split)
                if split == "validation":
                    held.add(record)
                else:
                    yield record

        rows: dict[Split, int] = {"train": form.write(train(), aside)}
        if share:
            rows["validation"] = form.write(held.taken(), aside, "validation")
        if form.keeps_failures:
            form.write_failures(failures.taken(), aside)
    return rows


def _verify(form: Format, rows: dict[Split, int], aside: Path) -> None:
    for split, written in rows.items():
        try:
            found = form.count(aside, split)
        except ValueError as error:
            raise StoreError(f"what was written to {aside} does not read back: {error}") from error
        if found != written:
            raise StoreError(f"{written} rows were written to {aside}, and {found} are found there")


class _Spool:
    """Records that wait in a file for their turn; the file is gone when the block ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b", buffering=1 << 20)

    def __enter__(self) -> "_Spool":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk, which whoever filled it has been told
            self._file.close()
        self._path.unlink()

    def add(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def taken(self) -> Iterator[Record]:
        """All of them, in the order they came."""
        self._file.seek(0)
        yield from map(msgspec.json.Decoder(Record).decode, self._file)


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in names.most_common())


def summary(form: Format, rows: dict[Split, int], sieve: Sieve, tally: Tally) -> Iterator[str]:
    """For a person: what went out, what did not, and what to know of it."""
    splits = ", ".join(f"{rows[split]:,} {split}" for split in SPLITS if split in rows)
    yield f"{tally.rows:,} rows ({splits}) of {sieve.read:,} records"
    yield from (f"  left out: {count:,} {reason}" for reason, count in sieve.reasons.most_common())
    if tally.rows:
        shares = np.array(tally.shares)
        yield (
            f"  supervised: {sum(tally.lengths):,} tokens; of a row at least {shares.min():.1%}, "
            f"half of them {np.median(shares):.1%} or more"
        )
    if len(tally.settings) > 1:
        yield f"  made with {len(tally.settings)} settings, which the card tells apart: {_counted(tally.settings)}"
    if cut := tally.finish[CUT]:
        yield f"  {cut:,} rows are cut at --max-length: finish_reason {CUT}, without an end token"
    if tally.finish["length"] and not form.needs_ids and not form.is_closed:
        yield (
            f"  {tally.finish['length']:,} rows end at max_tokens (finish_reason length): a chat template would "
            "invent their end; --drop truncated leaves them out"
        )
