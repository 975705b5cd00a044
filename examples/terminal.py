"""``python -m examples.terminal PICTURE.svg -- COMMAND...``: runs a command in a terminal of 80 columns, and draws what
it showed. ``make pictures`` draws those of README with it.
"""

import argparse
import io
import os
import pty
import re
import shlex
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

COLUMNS = 80
# A picture loads nothing from other servers: whoever looks at it has a font of equal widths.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S).replace(
    "Fira Code", "DejaVu Sans Mono"
)


def shown_by(command: list[str]) -> tuple[int, str]:
    """The exit code of a command, and all that a terminal would have on its lines in the end."""
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    written = io.BytesIO()

    def read(terminal: int) -> bytes:
        some = os.read(terminal, 1 << 16)
        written.write(some)
        return some

    code = os.waitstatus_to_exitcode(pty.spawn(command, read))
    lines = written.getvalue().decode(errors="replace").replace("\r\n", "\n").splitlines()
    # What a carriage return overwrites, nobody sees in the end.
    return code, "\n".join(line.rpartition("\r")[2] for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.terminal", description="Draw what a command shows.")
    parser.add_argument("picture", type=Path, metavar="PICTURE.svg")
    parser.add_argument("--typed", help="what stands behind the prompt; default: the command")
    parser.add_argument("--last", type=int, default=40, metavar="N", help="draw the last N lines (default 40)")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    options = parser.parse_args()
    code, shown = shown_by(options.command)
    typed = f"$ {options.typed or shlex.join(options.command)}"
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(typed, style="bold"))
    console.print(Text.from_ansi("\n".join(shown.rstrip().split("\n")[-options.last :])))
    console.save_svg(str(options.picture), title=options.typed or "", theme=DIMMED_MONOKAI, code_format=FORMAT)
    return code


if __name__ == "__main__":
    sys.exit(main())
