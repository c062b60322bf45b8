"""Is this dataset worth training on? Any .jsonl, .jsonl.zst or .parquet, ours or others', or a run folder; as a stream.

A row that cannot be read is counted and named; only a set without one row of a known shape is an error.
"""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from tokenmill import dataset
from tokenmill.core.judge import Rules
from tokenmill.errors import UsageError
from tokenmill.folder import RunFolder
from tokenmill.inspecting.measuring import Found, measure, measure_record
from tokenmill.inspecting.reading import Sized, names, stream
from tokenmill.inspecting.shapes import SHAPES, Bad
from tokenmill.inspecting.tally import Tally
from tokenmill.inspecting.trainer import Trainer
from tokenmill.inspecting.verdict import Inspection, conclude, reasons
from tokenmill.plain import speed
from tokenmill.rows import files
from tokenmill.servers import folder_of, judge_of
from tokenmill.steps import Meter, Tell

TELL_ROWS = 256
"""Rows between two looks at the verdict so far."""

BATCH = 64
"""Rows measured at once: a tokenizer uses as many cores, and 64 rows of 8,000 tokens are 6 MB."""

STRANGE_ROWS = 1000
"""Rows without any of a known shape after which a set is given up: reading 900,000 would not change it."""

Measured = Iterator[tuple[Found, int]]
"""What a row shows, and its bytes."""


def inspect_any(data: Path, model: Path | None, tell: Tell) -> Inspection:
    """As on the command line: a run may be named by its config, and is judged by its own rules."""
    folder = folder_of(data) if data.suffix == ".toml" else RunFolder(data)
    rules = judge_of(data, folder) if folder.config.exists() else None
    return inspect(folder.path, rules, model=model, tell=tell)


def inspect(
    path: Path,
    rules: Rules | None = None,
    *,
    model: Path | None = None,
    tell: Tell = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Inspection:
    """Reads all rows once. `model` is a folder with a tokenizer; `tell` hears how far it is.

    Raises UsageError where there is nothing to read, a file is damaged, or no row has a known shape.
    """
    tally = Tally(rules or Rules())
    trainer = Trainer(model) if model else None
    marked = trainer.marked if trainer else None
    began, volume = clock(), 0
    with Meter(tell, "read", unit="rows", clock=clock) as meter:
        for found, size in _found(path, tally.rules, trainer):
            tally.add(found)
            volume += size
            if tally.rows % TELL_ROWS == 0 and meter.due:
                meter.at(tally.rows, _so_far(tally, volume, clock() - began, marked))
    if not tally.rows:
        raise UsageError(f"{path} holds no row")
    return conclude(tally, marked)


def _so_far(tally: Tally, volume: int, seconds: float, marked: bool | None) -> str:
    """Of all that was read: bytes a second, where a file is read, and what it would fail of."""
    rate = speed(volume / max(seconds, 1e-9)) if volume else ""
    worst = next((reason.text for reason in reasons(tally, marked) if reason.level == "fail"), "")
    return "; ".join(filter(None, (rate, worst and f"it fails so far: {worst}")))


def _found(path: Path, rules: Rules, trainer: Trainer | None) -> Measured:
    if dataset.is_run(path):
        asked = (record for record in dataset.records(path / "data") if "broken_off" not in record.labels)
        yield from ((measure_record(record, rules), 0) for record in asked)
        return
    every = files(path)
    ours = [file for file in every if _is_ours(file)]
    for part in ours:
        yield from ((measure_record(record, rules), 0) for record in dataset.part_records(part))
    if others := [file for file in every if file not in ours]:
        rows = _of_known_shape(path, others)
        while some := list(islice(rows, BATCH)):
            found = measure([row for row, _ in some], rules, trainer)
            yield from zip(found, (size for _, size in some), strict=True)


def _of_known_shape(path: Path, some: list[Path]) -> Iterator[Sized]:
    """All rows of these files of the set, once one of the first is known to have a known shape."""
    rows, first = stream(some), list[Sized]()
    for one in rows:
        first.append(one)
        if not isinstance(one[0], Bad):
            break
        if len(first) == STRANGE_ROWS:
            raise _no_shape(path, some[0], first)
    else:
        if first:
            raise _no_shape(path, some[0], first)
    yield from first
    yield from rows


def _is_ours(file: Path) -> bool:
    """Whether it is of a Parquet export or of a run's data folder: it holds records, which say more than messages."""
    return file.suffix == ".parquet" and set(names(file)) >= {"key", "labels", "output_ids", "parts"}


def _no_shape(path: Path, first: Path, strange: list[Sized]) -> UsageError:
    """Which fields were found, and which shapes are known."""
    bad = [row for row, _ in strange if isinstance(row, Bad)]
    odd = next((row for row in bad if row.fields is not None), bad[0])
    why = f"{odd.name}: {odd.why}"
    if first.suffix == ".parquet":
        why = f"the columns of {first.name}: {', '.join(names(first))}"
    return UsageError(
        f"{path}: no row of the first {len(bad):,} can be used; {why}", fix="known shapes: " + "; ".join(SHAPES)
    )
