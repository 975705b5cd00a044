"""``python -m examples.analyze``: makes a log, analyzes it, and draws the picture of docs/analyze.md."""

import argparse
import contextlib
import io
from pathlib import Path

import msgspec

from blendhub.cli import main as blendhub
from blendhub.tools.analysis.findings import Findings
from examples.analyze.log import as_lines
from examples.analyze.picture import draw

QUESTIONS = 400


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.analyze", description="Analyze a log that is made up.")
    parser.add_argument("--out", type=Path, default=Path("build/analyze"), metavar="FOLDER", help="build/analyze")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    log, page = out / "requests.jsonl", out / "report.html"
    log.write_text(as_lines(QUESTIONS), encoding="utf-8")
    (out / "report.svg").write_text(draw(analyzed(log, page)), encoding="utf-8")
    print(f"blendhub analyze --bytes {log}\nwrote {page}; {out}/report.svg has its plots")


def analyzed(log: Path, page: Path) -> Findings:
    """What `blendhub analyze` finds; tokens are bytes, and small, so that arenas of some GiB make a difference."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        blendhub(["analyze", "--bytes", "--json", "--report", str(page), *SIZES, str(log)])
    return msgspec.json.decode(printed.getvalue(), type=Findings)


SIZES = ["--arena-gib", "0.5,1,2,4,8,16,32,64", "--kv-bytes-per-token", str(32 * 1024)]


if __name__ == "__main__":
    main()
