"""Which prompts come first, and which cohort each belongs to. Numbers in, numbers out."""

from collections.abc import Iterator


def spread(total: int, wanted: int) -> list[int]:
    """`wanted` of the numbers 0 … total-1, evenly spread over them, ascending."""
    count = min(total, wanted)
    return [place * total // count for place in range(count)]


def cohorts(first: int, size: int) -> Iterator[int]:
    """The cohort of each id in order of dispatch: `size` times `first`, then the next number, without end."""
    while True:
        for _ in range(size):
            yield first
        first += 1
