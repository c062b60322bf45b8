"""What a run was asked for, in data/prompts.json: enough to prove, without the prompt set, that shards make it whole.

Written at every start, so that it tells of the prompt set as it was last read.
"""

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.folder import write_aside
from tokenmill.ledger import Ledger
from tokenmill.prompts import Index


class Asked(msgspec.Struct, frozen=True):
    """`rows` of the whole prompt set; `keys` is the hash of all their keys as a set, `content` of keys and content, row
    by row; `completions` are the ids asked of this shard (i of n), `samples` of each prompt."""

    rows: int
    keys: str
    content: str
    shard: tuple[int, int]
    samples: int
    completions: int


def of(index: Index, ledger: Ledger, shard: tuple[int, int]) -> Asked:
    """As a start finds it."""
    content = xxhash.xxh3_128(index.keys.tobytes())
    content.update(index.digests.tobytes())
    asked_for = ledger.counts().total
    return Asked(len(index), keys_hash(index.keys), content.hexdigest(), shard, ledger.samples, asked_for)


def keys_hash(hashes: npt.NDArray[np.uint64]) -> str:
    """One hash for a set of keys, given theirs, in any order, each once."""
    return xxhash.xxh3_128_hexdigest(np.sort(hashes).tobytes())


def keep(data: Path, asked: Asked) -> None:
    """Writes it, unless it stands there."""
    if read(data) != asked:
        write_aside(data / "prompts.json", msgspec.json.encode(asked), sync=True)


def read(data: Path) -> Asked | None:
    """None where there is none: nothing was ever asked for, or by a tokenmill that did not note it."""
    try:
        return msgspec.json.decode((data / "prompts.json").read_bytes(), type=Asked)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
