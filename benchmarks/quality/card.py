"""Makes the model card of the real model with ``blendhub advise``, whose arguments may follow: ``make model-card``."""

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

CARD = Path("docs/models/smollm2-135m.md")
PROMPTS = 12
"""Each has four questions."""


def main(more: list[str]) -> int:
    os.environ.update(ENVIRONMENT)
    data = BUILD / "facts.jsonl"
    model = make_real_model()
    entries = [
        {
            "documents": documents,
            "question": f"{question.question} Answer with one word.",
            "answer": question.right.strip(),
        }
        for documents, questions in islice(biographies("test"), PROMPTS)
        for question in questions
    ]
    data.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    CARD.parent.mkdir(exist_ok=True)
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": LONGEST}
    arguments = {
        "--model": str(model.relative_to(Path.cwd())),
        "--data": str(data),
        "--card": str(CARD),
        "--selectors": Settings().selector.name,
        "--ratios": "0,0.05,0.15,0.3,0.5",
        "--engine": json.dumps(engine),
        "--settings": json.dumps({"hub": {"arena_gib": 3}}),
    }
    return blendhub(["advise", *(text for pair in arguments.items() for text in pair), *more])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
