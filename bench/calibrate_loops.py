"""How often the judge takes sound text for a loop, and how often it finds one: python -m bench.calibrate_loops.

Sound text is what this machine has: docs, docstrings, code, JSON, man pages, licences, logs, tables, and what a real
model wrote (`--written`, made by bench.written). Rows look as completions do: a thought, a closing tag, an answer;
lengths are log-normal. Loops are put into such rows, of each period and in each place. The same seed gives the same
rows on the same machine.
"""

import argparse
import ast
import gzip
import itertools
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import quantiles

from rich.console import Console
from rich.table import Table

from tokenmill.core import judge
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import Completion

ROOT = Path(__file__).parent.parent
LIBRARY, SITE = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
SHARE, LOGS = Path("/usr/share"), Path("/var/log")

MEDIAN_CHARS, SIGMA, LEAST, MOST = 6000, 0.9, 300, 30_000
"""Of a row: half of them between 3,300 and 11,000 characters, as thoughts of 800 to 2,700 tokens are."""

THOUGHT = 0.7
FILES = 3000
"""Of a kind, at most: enough for any number of rows, and seconds to read."""

POOL = 400
"""Texts that loops are put into: reading them takes longer than all the rest."""

LIMIT = 8.0


# -- sound text --------------------------------------------------------------------------------------------------------
def read(path: Path) -> str:
    data = path.read_bytes()[:400_000]
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")
    except (OSError, EOFError):
        return ""  # cut off in the middle of what was packed


def docstrings(path: Path) -> str:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def table(rng: random.Random) -> str:
    """A table as models write them: Markdown, CSV, or numbers in columns."""
    columns, rows = rng.randint(3, 7), rng.randint(20, 120)
    form = rng.choice(["| {} |", "{}", "  {}"])
    between = {"| {} |": " | ", "{}": ",", "  {}": "   "}[form]
    words = ["north", "south", "total", "mean", "alpha", "beta", "yes", "no", "n/a", "open", "closed"]
    kinds = [rng.choice("wifn") for _ in range(columns)]

    def cell(kind: str, row: int) -> str:
        if kind == "w":
            return rng.choice(words)
        return str(row) if kind == "n" else f"{rng.random():.3f}" if kind == "f" else str(rng.randint(0, 9999))

    return "\n".join(form.format(between.join(cell(kind, row) for kind in kinds)) for row in range(rows))


def found(*patterns: tuple[Path, str]) -> list[Path]:
    paths = sorted({path for root, pattern in patterns for path in root.glob(pattern) if path.is_file()})
    random.Random(1).shuffle(paths)
    return paths[:FILES]


def sources() -> dict[str, Iterator[str]]:
    """Endless texts of each kind; a kind that this machine has nothing of is left out."""
    code = found((LIBRARY, "*.py"), (LIBRARY, "*/*.py"), (SITE, "**/*.py"))
    files: dict[str, tuple[list[Path], Callable[[Path], str]]] = {
        "code": (code, read),
        "docstrings": (code, docstrings),
        "docs": (found((SITE, "**/*.md"), (SITE, "**/*.rst"), (SITE, "**/*.txt"), (SHARE, "doc/**/*README*")), read),
        "licences": (found((SHARE, "doc/*/copyright"), (SHARE, "common-licenses/*"), (SITE, "**/LICENSE*")), read),
        "man pages": (found((SHARE, "man/man*/*.gz"), (SHARE, "man/*/man*/*.gz")), read),
        "change logs": (found((SHARE, "doc/*/changelog*.gz")), read),
        "json": (found((SITE, "**/*.json"), (SHARE, "**/*.json")), read),
        "logs": (found((ROOT, "tests/data/**/*.log"), (LOGS, "**/*.log")), read),
    }
    ready = {kind: texts(paths, reader) for kind, (paths, reader) in files.items() if paths}
    ready["tables"] = (table(rng) for rng in [random.Random(2)] for _ in iter(int, 1))
    return ready


def texts(paths: list[Path], reader: Callable[[Path], str]) -> Iterator[str]:
    while True:
        for path in paths:
            if text := reader(path).strip():
                yield text


def length(rng: random.Random) -> int:
    return int(min(MOST, max(LEAST, rng.lognormvariate(0, SIGMA) * MEDIAN_CHARS)))


def piece(stream: Iterator[str], chars: int, rng: random.Random) -> str:
    """A stretch of texts, from any place of the first one."""
    text = next(stream)
    text = text[rng.randrange(max(1, len(text) - chars)) :][:chars]
    while len(text) < chars:
        text += "\n\n" + next(stream)[: chars - len(text)]
    return text


def row(thought: str, answer: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{answer}"


def ratio(text: str) -> float:
    return judge.measure(Completion(text, "stop"), Reading(thinking=True), Rules()).repetition


def goes_round(text: str) -> bool:
    """Whether it ends in three equal rounds or more, of at least 200 characters together: slow, and exact."""
    rounds = (text[-length:] for length in range(1, len(text) // 3 + 1))
    return any(text.endswith(end * max(3, -(-200 // len(end)))) for end in rounds)


# -- loops -------------------------------------------------------------------------------------------------------------
PERIODS = ("one token", "phrase", "sentence", "paragraph of 300 words", "growing counter", "growing counter, long")
PLACES = ("end of the thought", "end of the answer", "middle of the thought")


def loop(period: str, words: list[str], chars: int, rng: random.Random) -> str:
    """So many characters of a loop."""
    some = rng.randrange(len(words) - 400)
    count = {"phrase": rng.randint(3, 7), "sentence": rng.randint(12, 30), "paragraph of 300 words": 300}.get(period, 5)
    unit = " ".join(words[some : some + count])
    if period == "one token":
        unit = rng.choice(["!", " the", "0", "\n", "…", " Wait,"])
        return (unit * chars)[:chars]
    if not period.startswith("growing"):
        return ((unit + ". ") * (chars // len(unit) + 1))[:chars]
    if period.endswith("long"):
        unit = " ".join(words[some : some + 25])
    return "".join(f"{number}. {unit} {number + 1}. " for number in range(1, chars // len(unit) + 1))[:chars]


def with_loop(period: str, place: str, chars: int, prose: Iterator[str], rng: random.Random) -> str:
    words = piece(prose, 8000, rng).split()
    thought, answer = piece(prose, length(rng), rng), piece(prose, rng.randint(300, 3000), rng)
    circle = loop(period, words, chars, rng)
    if place == "end of the thought":
        return row(thought + circle, answer)
    if place == "end of the answer":
        return row(thought, answer + circle)
    half = rng.randrange(len(thought))
    return row(thought[:half] + circle + thought[half:] + piece(prose, 5000, rng), answer)


# -- the tables --------------------------------------------------------------------------------------------------------
def share(ratios: list[float]) -> str:
    return f"{sum(value > LIMIT for value in ratios) / len(ratios):.0%}"


def line(kind: str, ratios: list[float]) -> list[str]:
    marks = quantiles(ratios, n=1000, method="inclusive")
    over = sum(value > LIMIT for value in ratios)
    return [
        *(kind, f"{len(ratios):,}", f"{marks[499]:.2f}", f"{marks[989]:.2f}", f"{max(ratios):.1f}"),
        f"{over} ({over / len(ratios):.2%})",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.calibrate_loops")
    parser.add_argument("--rows", type=int, default=500, help="of each kind of sound text")
    parser.add_argument("--loops", type=int, default=100, help="of each period, place and length")
    parser.add_argument("--written", type=Path, help="rows of bench.written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="where each false alarm begins")
    given = parser.parse_args()
    out, rng = Console(width=140), random.Random(given.seed)
    sound = Table("sound text", "rows", "p50", "p99", "max", f"above {LIMIT}")
    every: list[float] = []
    for kind, stream in sources().items():
        ratios = []
        for _ in range(given.rows):
            text = piece(stream, length(rng), rng)
            cut = int(len(text) * THOUGHT)
            ratios.append(ratio(row(text[:cut], text[cut:])))
            if given.show and ratios[-1] > LIMIT:
                out.print(kind, ratios[-1], repr(text[:200]), markup=False)
        sound.add_row(*line(kind, ratios))
        every += ratios
    sound.add_row(*line("all", every))
    written = [json.loads(text) for text in given.written.read_text().splitlines()] if given.written else []
    for kind in sorted({entry["kind"] for entry in written}):
        for circle, words in ((False, "sound"), (True, "goes round at its end")):
            own = [entry["text"] for entry in written if entry["kind"] == kind and goes_round(entry["text"]) == circle]
            if len(own) > 1:
                sound.add_row(*line(f"SmolLM2, {kind}, {words}", [ratio(text) for text in own]))
    out.print(sound)
    docs = sources()["docstrings"]
    prose = itertools.cycle([next(docs) for _ in range(POOL)])
    lengths = (2000, 4000, 8000, 16_000)
    loops = Table("loop", "in", *(f"{chars:,} characters" for chars in lengths))
    for period in PERIODS:
        for place in PLACES:
            shares = (
                share([ratio(with_loop(period, place, chars, prose, rng)) for _ in range(given.loops)])
                for chars in lengths
            )
            loops.add_row(period, place, *shares)
    out.print(loops)


if __name__ == "__main__":
    main()
