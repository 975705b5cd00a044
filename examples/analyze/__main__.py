"""``python -m examples.analyze``: makes the log of docs/analyze.md, and analyzes it."""

import argparse
from pathlib import Path

from blendhub.cli import main as blendhub
from examples.analyze.log import as_lines

QUESTIONS = 400
# Tokens are bytes, and small, so that arenas of some GiB make a difference.
SIZES = ["--arena-gib", "0.5,1,2,4,8,16,32,64", "--kv-bytes-per-token", str(32 * 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.analyze", description="Analyze a log that is made up.")
    parser.add_argument("--out", type=Path, default=Path("build/analyze"), metavar="FOLDER", help="build/analyze")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    log = out / "requests.jsonl"
    log.write_text(as_lines(QUESTIONS), encoding="utf-8")
    blendhub(["analyze", "--bytes", *SIZES, str(log)])


if __name__ == "__main__":
    main()
