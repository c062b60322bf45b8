"""What a run has measured of itself so far: lengths of completions and rates, read from its folder."""

from array import array
from dataclasses import dataclass
from math import sqrt

import numpy as np

from tokenmill import dataset
from tokenmill.core.records import FAILURES
from tokenmill.folder import RunFolder

FEWEST = 30
"""Completions from which a mean is told."""

TRIES = 3
"""A run that goes on may seal a journal, which takes the file away, while it is read: then all is read again."""

RATE_FROM_S = 60.0
"""Seconds of generating from which a rate is told: first batches are still filling."""


@dataclass(frozen=True, slots=True)
class Measured:
    """`records` have ended, with `tokens` of output in `completions`. `mean` are bounds of a completion's mean tokens,
    `rate` those of tokens a second; None while too little is known."""

    records: int = 0
    completions: int = 0
    tokens: int = 0
    mean: tuple[float, float] | None = None
    rate: tuple[float, float] | None = None


def measure(folder: RunFolder, *, most: int, in_flight: int) -> Measured:
    """`most` is what one completion may have; `in_flight` of them have not ended.

    The first to end are the shortest, so the upper bound takes those in flight to be as long as they may be; both
    bounds are two standard errors wide.
    """
    records, found = _lengths(folder)
    mean = None
    if len(found) >= FEWEST:
        values = np.array(found, dtype=np.float64)
        error = 2 * float(values.std()) / sqrt(len(values))
        upper = (float(values.sum()) + in_flight * most) / (len(values) + in_flight)
        mean = max(1.0, float(values.mean()) - error), min(float(most), upper + error)
    return Measured(records, len(found), sum(found), mean, _rate(folder))


def _lengths(folder: RunFolder) -> "tuple[int, array[int]]":
    """All records, and the tokens of those that are completions."""
    for _ in range(TRIES):
        records, found = 0, array("I")
        try:
            for brief in dataset.briefs(folder.data):
                records += 1
                if not FAILURES.intersection(brief.labels):
                    found.append(brief.output_tokens)
        except FileNotFoundError:
            continue
        return records, found
    return 0, array("I")


def _rate(folder: RunFolder) -> tuple[float, float] | None:
    """Of the run so far and of its last minute."""
    status = folder.status()
    if status is None or status.seconds < RATE_FROM_S or not status.tokens:
        return None
    rates = [status.tokens / status.seconds]
    if status.state == "generating" and status.tokens_per_s:
        rates.append(status.tokens_per_s)
    return min(rates), max(rates)
