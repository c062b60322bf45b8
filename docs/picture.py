"""A terminal's screen as a picture: `tmux capture-pane -ep -t NAME | python docs/picture.py docs/run.svg`."""

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

screen = Text.from_ansi(sys.stdin.read().rstrip())
lines = screen.split()
console = Console(record=True, width=max(line.cell_len for line in lines) + 2, file=io.StringIO())
for line in lines:
    console.print(line, soft_wrap=True)
# Rich's own picture loads a font from elsewhere: nothing here needs a network.
own = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
Path(sys.argv[1]).write_text(console.export_svg(title="tokenmill run", code_format=own))
