"""Records → a dataset in a format: accepted ones, in the prompts' order, written aside, re-read, counted, renamed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenmill import dataset, plugins
from tokenmill.core import judge
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import Record
from tokenmill.errors import StoreError, UsageError
from tokenmill.folder import RunFolder
from tokenmill.formats.base import Format


def export(folder: RunFolder, name: str, out: Path, rules: Rules, *, samples: int) -> int:
    """Writes a run's accepted records to the folder `out`; returns their number. `out` must not exist yet."""
    kind = plugins.load("formats", name)
    if out.exists():
        raise UsageError(f"{out} exists already", fix="name a new folder, or remove it")
    several = samples > 1 or any(brief.sample or brief.turn for brief in dataset.briefs(folder.data))
    written: Format = kind(several=several)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        rows = written.write(accepted(folder.data, rules), aside)
        found = written.count(aside)
        if found != rows:
            raise StoreError(f"{rows} rows were written to {aside}, and {found} are found there")
        aside.rename(out)
    except OSError as error:
        raise StoreError(f"{out} could not be written: {error.strerror or error}", fix=f"df -h {out.parent}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return rows


def accepted(data: Path, rules: Rules) -> Iterator[Record]:
    """The accepted records under these rules, in the prompts' order."""
    for record in dataset.records(data):
        if judge.judged(record, rules)[0] is Verdict.ACCEPTED:
            yield record
