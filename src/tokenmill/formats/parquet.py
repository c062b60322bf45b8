"""parquet: all fields of the accepted records, token ids included, in the layout that `datasets.load_dataset` reads."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq

from tokenmill.core.records import Record
from tokenmill.formats.base import Format
from tokenmill.seal import SCHEMA, VERIFY_ROWS, groups, to_table

SHARD_BYTES = 500_000_000
"""As the hub's own datasets are cut."""

CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

Made by tokenmill. `prompt_ids` and `output_ids` are the token ids as the engine gave them: a loss mask is zeros for the
first and ones for the second, the sampled end token included. `labels` are what each completion shows; rejected and
failed ones are left out.
"""


class Parquet(Format):
    name = "parquet"
    bytes_a_token = 4.2

    def write(self, records: Iterable[Record], folder: Path) -> int:
        data = folder / "data"
        data.mkdir()
        (folder / "README.md").write_text(CARD, encoding="utf-8")
        waiting = groups(records, _size)
        rows = 0
        shards: list[Path] = []
        for first in waiting:
            shards.append(data / f"train-{len(shards):05d}.parquet")
            rows += self._write_shard(chain([first], waiting), shards[-1])
        for number, shard in enumerate(shards):
            shard.rename(data / f"train-{number:05d}-of-{len(shards):05d}.parquet")
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

    def count(self, folder: Path) -> int:
        return sum(
            batch.num_rows
            for shard in sorted((folder / "data").glob("*.parquet"))
            for batch in pq.ParquetFile(shard).iter_batches(batch_size=VERIFY_ROWS)
        )


def _size(record: Record) -> int:
    """About what it takes as a journal line."""
    return len(record.text) + sum(len(bytes(raw)) for raw in (record.messages, record.prompt_ids, record.output_ids))
