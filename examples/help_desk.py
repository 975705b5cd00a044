"""``python -m examples.help_desk``: makes the log of docs/index.md, a week of a help desk, and analyzes it.

Two assistants answer questions about documents, ranked anew for each question.
"""

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu")
BEGIN, WEEK = datetime(2026, 3, 2, 8, tzinfo=UTC), timedelta(days=7)
QUESTIONS, N_DOCUMENTS = 400, 60
FOLLOW_UPS = 0.3
"""So many questions are followed by another one about the same documents."""
LOG = Path("build/analyze/requests.jsonl")
# Tokens are bytes, and small, so that arenas of some GiB make a difference.
SIZES = ["--arena-gib", "0.5,1,2,4,8,16,32,64", "--kv-bytes-per-token", str(32 * 1024)]


def requests(n: int) -> Iterator[dict[str, Any]]:
    """Chat completions of ``n`` questions and what follows them, as OpenAI's clients ask for them, with their times."""
    rng = random.Random(1)

    def text(words: int) -> str:
        return " ".join("".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(words))

    systems = [text(60), text(90)]
    documents = [text(rng.randint(80, 200)) for _ in range(N_DOCUMENTS)]
    # A few documents are asked about often, as everywhere.
    weights = [1 / (rank + 1) for rank in range(N_DOCUMENTS)]
    for number in range(n):
        at = BEGIN + WEEK * number / n
        system = rng.choice(systems)
        ranked = dict.fromkeys(rng.choices(documents, weights, k=6))
        found = "\n\n".join(f"Found on {text(2)}:\n{document}" for document in ranked)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{found}\n\n{text(12)}?"}]
        yield {"timestamp": at.isoformat(), "model": "assistant", "messages": messages}
        if rng.random() < FOLLOW_UPS:
            later = (at + timedelta(seconds=40)).isoformat()
            answer, further = text(40), f"{text(10)}?"
            messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": further}]
            yield {"timestamp": later, "model": "assistant", "messages": messages}


def as_lines(n: int) -> str:
    return "".join(json.dumps(request) + "\n" for request in requests(n))


if __name__ == "__main__":
    from blendhub.cli import main as blendhub

    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text(as_lines(QUESTIONS), encoding="utf-8")
    blendhub(["analyze", "--bytes", *SIZES, str(LOG)])
