"""parquet: all fields of the accepted records, token ids included, in the layout that the hub and
`datasets.load_dataset` read: data/train-00000-of-00002.parquet, with a card (card.py) that names the splits.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq

from tokenmill.core.records import Record
from tokenmill.formats.base import Format, Split
from tokenmill.seal import SCHEMA, VERIFY_ROWS, groups, to_table

SHARD_BYTES = 500_000_000
"""As the hub's own datasets are cut."""


class Parquet(Format):
    name = "parquet"
    bytes_a_token = 4.2
    story = (
        "`prompt_ids` and `output_ids` are the token ids as the engine gave them: a loss mask is zeros for the first "
        "and ones for the second, the sampled end token included. `labels` are what each completion shows."
    )

    def pattern(self, split: Split) -> str:
        return f"data/{split}-*.parquet"

    def write(self, records: Iterable[Record], folder: Path, split: Split = "train") -> int:
        data = folder / "data"
        data.mkdir(exist_ok=True)
        waiting = groups(records, _size)
        rows = 0
        shards: list[Path] = []
        for first in waiting:
            shards.append(data / f"{split}-{len(shards):05d}.parquet")
            rows += self._write_shard(chain([first], waiting), shards[-1])
        for number, shard in enumerate(shards):
            shard.rename(data / f"{split}-{number:05d}-of-{len(shards):05d}.parquet")
        return rows

    def _write_shard(self, waiting: Iterator[list[Record]], path: Path) -> int:
        """Takes row groups until the file is large enough; returns its rows."""
        rows = 0
        with path.open("wb") as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
            for group in waiting:
                writer.write_table(to_table(group))
                rows += len(group)
                if file.tell() >= SHARD_BYTES:
                    break
        return rows

    def count(self, folder: Path, split: Split = "train") -> int:
        rows = 0
        for shard in sorted(folder.glob(self.pattern(split))):
            with pq.ParquetFile(shard) as file:
                rows += sum(batch.num_rows for batch in file.iter_batches(batch_size=VERIFY_ROWS))
        return rows


def _size(record: Record) -> int:
    """About what it takes as a journal line."""
    return len(record.text) + sum(len(bytes(raw)) for raw in (record.messages, record.prompt_ids, record.output_ids))
