"""A set's rows as a stream of shapes: .jsonl, .jsonl.zst, .parquet or a folder of them. Memory stays flat.

Parquet files that hold token ids are read as arrays: as JSON, 1,000 rows of 4,000 tokens would take 300 MB.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.errors import UsageError
from tokenmill.inspecting.shapes import COLUMNS, IGNORED, MASKS, Shape, read, tokens
from tokenmill.rows import blocks

BATCH = 256
"""Rows of token ids taken out of a Parquet file at once: 16 MB at 8,000 tokens."""

BUFFER = 1 << 20
"""Bytes of a column read at once: without it, a row group is read whole, which may be a gigabyte of token ids."""

Sized = tuple[Shape, int]
"""A row and the bytes it took, for the rate that is told."""


def stream(found: Iterable[Path]) -> Iterator[Sized]:
    """All rows of some files in order. Raises UsageError where one is damaged."""
    for file in found:
        kind = _mask_column(file)
        if kind:
            yield from _arrays(file, kind)
        else:
            for first, _, block in blocks(file, COLUMNS):
                for line, data in enumerate(block, first):
                    if data and not data.isspace():
                        yield read(f"{file.name}:{line}", data), len(data)


def names(path: Path) -> list[str]:
    """The columns of a Parquet file; raises UsageError where it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def _mask_column(file: Path) -> str:
    """The mask's column of a Parquet file of token ids; empty for other files."""
    found = names(file) if file.suffix == ".parquet" else []
    return next((name for name in MASKS if name in found), "") if "input_ids" in found else ""


def _arrays(file: Path, kind: str) -> Iterator[Sized]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = ("id", "input_ids", kind, "finish_reason", "text")
    try:
        with pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as table:
            there = [name for name in table.schema_arrow.names if name in wanted]
            number = 0
            for batch in table.iter_batches(batch_size=BATCH, columns=there):
                ids, marks = _lists(batch.column("input_ids")), _lists(batch.column(kind))
                rest = [_texts(batch, name) for name in ("id", "finish_reason", "text")]
                for own, mark, name, finish, text in zip(ids, marks, *rest, strict=True):
                    number += 1
                    size = sum(0 if part is None else part.nbytes for part in (own, mark))
                    place = f"{file.name}:{number}" if name is None else str(name)
                    yield (
                        tokens(place, own, _mask(mark, kind), kind, finish=_word(finish), text=_word(text) or ""),
                        size,
                    )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is damaged: {error}") from error


def _texts(batch: Any, name: str) -> list[str | int | None]:
    """A column of names or words; None where it holds anything else."""
    found = batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows
    return [one if isinstance(one, str | int) else None for one in found]


def _word(value: str | int | None) -> str | None:
    return value if isinstance(value, str) else None


def _lists(column: Any) -> Iterator[npt.NDArray[np.int64] | None]:
    """Each row's numbers as an array; None where it has none, or other things than whole numbers or booleans."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):  # as `datasets` writes rows that are all padded to one length
        column = column.cast(pa.list_(column.type.value_type))
    kind = column.type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not listed or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        yield from [None] * len(column)
        return
    if column.values.null_count:
        for one in column:
            yield None if one.as_py() is None or None in one.as_py() else np.array(one.as_py(), dtype=np.int64)
        return
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    missing = column.is_null().to_pylist() if column.null_count else [False] * len(column)
    for number, is_null in enumerate(missing):
        yield None if is_null else values[offsets[number] : offsets[number + 1]]


def _mask(marks: npt.NDArray[Any] | None, kind: str) -> npt.NDArray[np.bool_] | None:
    if marks is None or marks.dtype == np.bool_:
        return marks
    if kind == "labels":
        return np.asarray(marks != IGNORED)
    return None if len(marks) and (marks.min() < 0 or marks.max() > 1) else marks.astype(np.bool_)
