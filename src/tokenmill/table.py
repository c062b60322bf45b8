"""Rows of a terminal's screen: a line each, trouble first and the rest in one line where not all have room. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from tokenmill.untrusted import harmless

GAP = 2
"""Between columns."""

LEAST_PROBLEM = 30
"""Room beside a row that its problem is worth; with less it stands below."""


@dataclass(frozen=True, slots=True)
class Row:
    """`cells` are its words, the second its state in `style`. `problem` stands beside or below it; below only where it
    `presses`. Rows of a lower `rank` are shown first where not all have room."""

    cells: tuple[str, ...]
    problem: str
    presses: bool
    rank: tuple[int, int]
    style: str = ""
    is_fine: bool = False


Sum = Callable[[Sequence[int], bool], str]
"""What is said of the rows by these numbers that have no room, and whether they are all."""


def table(
    columns: Sequence[str], beside: str, rows: Sequence[Row], width: int, room: int, summed: Sum
) -> Iterator[Text]:
    """At most `room` lines with the title; `beside` is what the problems' column is called."""
    widths = [max(map(cell_len, column)) for column in zip(columns, *(row.cells for row in rows), strict=True)]
    kept = len(columns)
    while kept > 2 and sum(widths[:kept]) + GAP * (kept - 1) > width:
        kept -= 1  # narrow terminals lose the right-most columns, never the state
    is_beside = width - sum(widths[:kept]) - GAP * kept >= LEAST_PROBLEM
    title = "  ".join(set_cell_size(name, size) for name, size in zip(columns[:kept], widths, strict=False))
    yield Text(f"{title}  {beside if is_beside else ''}".rstrip(), style="dim")
    blocks = [list(_lines(row, widths[:kept], is_beside)) for row in rows]
    if sum(map(len, blocks)) < room:
        for block in blocks:
            yield from block
        return
    order = sorted(range(len(rows)), key=lambda number: rows[number].rank)
    left, shown = room - 2, 0  # the title and the sum
    for number in order:
        if len(blocks[number]) > left:
            break
        left -= len(blocks[number])
        shown += 1
        yield from blocks[number]
    yield Text(summed(order[shown:], not shown), style="dim")


def _lines(row: Row, widths: Sequence[int], beside: bool) -> Iterator[Text]:
    line = Text()
    for number, (word, size) in enumerate(zip(row.cells, widths, strict=False)):
        line.append(set_cell_size(word, size), style=row.style if number == 1 else "")
        line.append(" " * GAP)
    problem = harmless(row.problem)
    if problem and beside:
        line.append(problem, style="dim" if row.is_fine else "yellow")
    line.rstrip()
    yield line
    if problem and row.presses and not beside:
        yield Text(f"    {problem}", style="yellow")
