"""python -m bench [NAME …] [--smoke] [--scratch DIR]: measures, and prints one table."""

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.figures import FIGURES, SMOKE, Scale, clear


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="all where none is named")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does the code still run")
    parser.add_argument("--scratch", type=Path, help="a folder to keep prompt files in between runs")
    args = parser.parse_args()
    table = Table("measure", "goal", "this run", "floor here")
    out = Console(width=150)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for name in args.figures or FIGURES:
            clear(scratch)
            for row in FIGURES[name](scratch.resolve(), SMOKE if args.smoke else Scale()):
                table.add_row(row.what, row.goal, row.here, row.floor)
                out.print(f"{row.what}: {row.here}")
        clear(scratch)
    out.print(table)


if __name__ == "__main__":
    main()
