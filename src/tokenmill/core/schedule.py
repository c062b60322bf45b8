"""Which prompts come first, and which cohort each belongs to. Numbers in, numbers out."""

from collections.abc import Iterator, Mapping
from itertools import count, repeat


def spread(total: int, wanted: int) -> list[int]:
    """`wanted` of the numbers 0 … total-1, evenly spread over them, ascending."""
    chosen = min(total, wanted)
    return [place * total // chosen for place in range(chosen)]


def cohorts(held: Mapping[int, int], size: int) -> Iterator[int]:
    """The cohort of each id in order of dispatch, from 1 on, without end. `held` are the ids that cohorts have from
    earlier lives of the run: these are filled first. What was in flight when a life ended were its longest answers, and
    a cohort of nothing else would be a bad one (a run of 1,000 was stopped for it)."""
    for number in sorted(number for number in held if number > 0):
        yield from repeat(number, size - held[number])
    for number in count(max([0, *held]) + 1):
        yield from repeat(number, size)
