"""What reuse costs in right answers, and what selectors win back, in real vLLM: ``python -m benchmarks.quality``."""

import argparse
from pathlib import Path

from benchmarks.quality import reader_run, report, text_run
from benchmarks.quality.arguments import Parser
from benchmarks.quality.compared import SELECTORS
from benchmarks.quality.outcomes import kept
from benchmarks.quality.rows import rows_of_reader, rows_of_texts


def main() -> None:
    given = _arguments()
    if given.model:
        outcomes = kept(text_run.run(given.model, given.data, given.until, given.quick), given.out)
        found = text_run.found(outcomes)
        rows = rows_of_texts(found)
    else:
        size = reader_run.QUICK if given.quick else reader_run.WHOLE
        found = reader_run.found(kept(reader_run.run(given.checkpoint, size), given.out))
        rows = rows_of_reader(found, [one.label for one in SELECTORS if one.ships])
    report.write(found, rows, given.out, given.json or given.out / "report.json")


def _arguments() -> argparse.Namespace:
    parser = Parser("python -m benchmarks.quality", __doc__)
    parser.add_argument("--out", type=Path, default=Path("build/quality"), help="default build/quality")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default report.json in that folder")
    return parser.parse()


if __name__ == "__main__":
    main()
