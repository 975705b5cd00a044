"""Makes the model card of the real model with ``blendhub advise``: ``python -m research.card``."""

import json
import os
import sys
from itertools import islice
from pathlib import Path

from benchmarks.quality.workloads import LONGEST, biographies
from blendhub.cli import main as blendhub
from blendhub.vllm.settings import Settings
from harness.engines.engine import ENVIRONMENT
from harness.engines.real_model import BUILD, make_real_model

CARD, DATA = Path(__file__).with_name("smollm2-135m.md"), BUILD / "facts.jsonl"
PROMPTS = 12
"""Each has four questions."""


def main() -> int:
    os.environ.update(ENVIRONMENT)
    model = make_real_model()
    with DATA.open("w") as data:
        for documents, questions in islice(biographies(), PROMPTS):
            for asked in questions:
                question, answer = f"{asked.question} Answer with one word.", asked.right.strip()
                data.write(json.dumps({"documents": documents, "question": question, "answer": answer}) + "\n")
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": LONGEST}
    settings = {"hub": {"arena_gib": 3}}
    files = ["--model", str(model.relative_to(Path.cwd())), "--data", str(DATA), "--card", str(CARD)]
    ways = ["--selectors", Settings().selector.name, "--ratios", "0,0.05,0.15,0.3,0.5"]
    engines = ["--engine", json.dumps(engine), "--settings", json.dumps(settings)]
    return blendhub(["advise", *files, *ways, *engines])


if __name__ == "__main__":
    sys.exit(main())
