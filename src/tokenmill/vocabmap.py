"""Which tokens a drafter with a smaller vocabulary needs: the most frequent ones among the supervised tokens of a run.

The maps are those of EAGLE-3 trainers: `d2t[i]` is the target's id of draft token i *less i* (an offset), `t2d[j]` says
whether target token j is in the draft vocabulary. By frequency, then by id; where fewer tokens were seen than are asked
for, the lowest other ids fill up (speculators 0.9: train/vocab_mapping.py; SpecForge 0.2 does alike).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import dataset, outfolder
from tokenmill.core import judge
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import NULL, Record
from tokenmill.errors import GateError, UsageError
from tokenmill.folder import RunFolder

SIZES = (8_000, 16_000, 32_000, 64_000)
"""Draft vocabularies whose coverage is told beside the one asked for."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class VocabMap:
    """`coverage` is the share of supervised tokens that the draft vocabulary can write; `counts` by target id."""

    d2t: Numbers
    t2d: npt.NDArray[np.bool_]
    counts: Numbers
    coverage: float


def count(records: Iterable[Record], rules: Rules, vocabulary: int) -> Numbers:
    """How often each id is supervised in accepted records; raises UsageError for an id outside the vocabulary."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for record in records:
        if record.output_ids == NULL or judge.judged(record, rules)[0] is not Verdict.ACCEPTED:
            continue
        text = bytes(record.output_ids)[1:-1].decode()
        if not text:
            continue
        ids: npt.NDArray[Any] = np.fromstring(text, dtype=np.int64, sep=",")
        if ids.max() >= vocabulary or ids.min() < 0:
            raise UsageError(
                f"{record.key} holds the id {ids.max()}, and the vocabulary has {vocabulary}",
                fix="--vocabulary N   as in the target model's config.json",
            )
        counts += np.bincount(ids, minlength=vocabulary)
    return counts


def build(counts: Numbers, size: int) -> VocabMap:
    """The map of the `size` most frequent tokens."""
    if not 0 < size <= len(counts):
        raise UsageError(f"--size {size} of a vocabulary of {len(counts)}", fix="smaller than the vocabulary")
    chosen = np.sort(np.lexsort((np.arange(len(counts)), -counts))[:size])
    t2d = np.zeros(len(counts), dtype=np.bool_)
    t2d[chosen] = True
    total = int(counts.sum())
    return VocabMap(chosen - np.arange(size), t2d, counts, int(counts[chosen].sum()) / total if total else 0.0)


def write(folder: RunFolder, out: Path, rules: Rules, *, size: int, vocabulary: int) -> list[str]:
    """Writes d2t-SIZE.npy, t2d-SIZE.npy (where speculators looks for them) and both in vocab-map.npz to the new folder
    `out`; returns what to tell of them."""
    counts = count(dataset.records(folder.data), rules, vocabulary)
    if not counts.any():
        raise GateError(f"no accepted record of {folder.path} has token ids", fix=f"tokenmill inspect {folder.path}")
    found = build(counts, size)
    with outfolder.made(out) as aside:
        np.save(aside / f"d2t-{size}.npy", found.d2t)
        np.save(aside / f"t2d-{size}.npy", found.t2d)
        np.savez(aside / "vocab-map.npz", d2t=found.d2t, t2d=found.t2d)
    return told(found)


def told(found: VocabMap) -> list[str]:
    """How much of the data the draft vocabulary covers, and what other sizes would."""
    ordered = np.cumsum(np.sort(found.counts)[::-1])
    others = [size for size in SIZES if size < len(ordered)]
    lines = [
        f"{len(found.d2t):,} of {len(found.counts):,} ids cover {found.coverage:.3%} of "
        f"{ordered[-1]:,} supervised tokens ({np.count_nonzero(found.counts):,} different ones)"
    ]
    return lines + [f"  {size:,} would cover {ordered[size - 1] / ordered[-1]:.3%}" for size in others]
