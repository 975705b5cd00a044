"""What reuse costs in right answers, and what selectors win back, in real vLLM: ``python -m benchmarks.quality``."""

import argparse
from pathlib import Path

from benchmarks.quality import reader_run, report
from benchmarks.quality.compared import SELECTORS
from benchmarks.quality.rows import rows_of_reader


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few questions: shows that it runs, measures little")
    parser.add_argument("--checkpoint", type=Path, default=reader_run.CHECKPOINT, help="another one of the reader")
    parser.add_argument(
        "--out", type=Path, default=Path("build/quality"), metavar="FOLDER", help="default build/quality"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="default report.json in that folder")
    given = parser.parse_args()
    size = reader_run.QUICK if given.quick else reader_run.WHOLE
    found = reader_run.found(reader_run.run(given.checkpoint, size))
    shipped = [one.label for one in SELECTORS if one.ships]
    report.write(found, rows_of_reader(found, shipped), given.out, given.json or given.out / "report.json")


if __name__ == "__main__":
    main()
