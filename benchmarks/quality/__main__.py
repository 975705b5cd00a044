"""What reuse costs in right answers, and what selectors win back, in real vLLM: ``python -m benchmarks.quality``."""

import argparse
from pathlib import Path

from benchmarks.quality import reader_run, report, text_run
from benchmarks.quality.compared import SELECTORS
from benchmarks.quality.files import SHAPES
from benchmarks.quality.rows import rows_of_reader, rows_of_texts


def main() -> None:
    given = _arguments()
    if given.model:
        found = text_run.found(text_run.run(given.model, given.data, given.until, given.quick))
        rows = rows_of_texts(found)
    else:
        size = reader_run.QUICK if given.quick else reader_run.WHOLE
        found = reader_run.found(reader_run.run(given.checkpoint, size))
        rows = rows_of_reader(found, [one.label for one in SELECTORS if one.ships])
    report.write(found, rows, given.out, given.json or given.out / "report.json")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description=__doc__,
        epilog=f"Without --model, a small trained reader is asked. Shapes of --data, as a list or by line:\n{SHAPES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few questions: shows that it runs, measures little")
    parser.add_argument("--checkpoint", type=Path, default=reader_run.CHECKPOINT, help="another one of the reader")
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="any model that vLLM serves; needs --data")
    parser.add_argument("--data", type=Path, metavar="FILE", help="questions to several documents; needs --model")
    parser.add_argument("--until", type=int, metavar="N", help="only the first questions of the file")
    parser.add_argument("--out", type=Path, default=Path("build/quality"), help="default build/quality")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default report.json in that folder")
    given = parser.parse_args()
    if bool(given.model) != bool(given.data):
        parser.error("--model and --data belong together")
    return given


if __name__ == "__main__":
    main()
