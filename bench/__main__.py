"""python -m bench [NAME …] [--smoke] [--scratch DIR] [--json FILE]: measures, and prints one table."""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import measure
from bench.figures import FIGURES, NOT_IN_SMALL, SMOKE, Scale, clear
from bench.peers import shown

OWN = "tokenmill-bench"
"""Of the scratch folder, what is cleared between figures: the folder that was named may be anybody's."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="all where none is named")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does the code still run")
    parser.add_argument("--scratch", type=Path, help="a folder to keep prompt files in between runs")
    parser.add_argument("--json", type=Path, help="a file for the rows, and for all that was measured for them")
    args = parser.parse_args()
    table = Table("measure", "goal", "this run", "floor", "peers")
    out = Console(width=170)
    kept: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (args.scratch or Path(temporary)) / OWN
        scratch.mkdir(parents=True, exist_ok=True)
        for name in args.figures or [name for name in FIGURES if not (args.smoke and name in NOT_IN_SMALL)]:
            sys.stderr.write(f"measuring {name}\n")
            clear(scratch)
            measure.TAKEN.clear()
            rows = FIGURES[name](scratch.resolve(), SMOKE if args.smoke else Scale())
            for row in rows:
                peers = row.peers or shown.beside(row.what)
                table.add_row(row.what, row.goal, row.here, row.floor, peers)
                out.print(f"{row.what}: {row.here}")
            kept.append({"figure": name, "rows": list(map(asdict, rows)), "runs": list(map(asdict, measure.TAKEN))})
            if args.json is not None:  # after each: a long one may be broken off
                args.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        clear(scratch)
    out.print(table)


if __name__ == "__main__":
    main()
