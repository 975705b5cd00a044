"""A week of a help desk: two assistants answer questions about documents, ranked anew for each question."""

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu")
BEGIN = datetime(2026, 3, 2, 8, tzinfo=UTC)
DAYS = 7
N_DOCUMENTS = 60
FOLLOW_UPS = 0.3
"""So many questions are followed by another one about the same documents."""


class HelpDesk:
    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._systems = [self._text(60), self._text(90)]
        self._documents = [self._text(self._random.randint(80, 200)) for _ in range(N_DOCUMENTS)]
        # A few documents are asked about often, as everywhere.
        self._weights = [1 / (rank + 1) for rank in range(N_DOCUMENTS)]

    def requests(self, n: int) -> Iterator[dict[str, Any]]:
        """Chat completions, as OpenAI's clients ask for them, with the time of each."""
        for number in range(n):
            at = BEGIN + timedelta(days=DAYS) * number / n
            messages = self._first_question()
            yield self._request(at, messages)
            if self._random.random() < FOLLOW_UPS:
                answer = {"role": "assistant", "content": self._text(40)}
                yield self._request(at + timedelta(seconds=40), [*messages, answer, self._question()])

    def _first_question(self) -> list[dict[str, str]]:
        system = {"role": "system", "content": self._random.choice(self._systems)}
        ranked = dict.fromkeys(self._random.choices(self._documents, self._weights, k=6))
        documents = "\n\n".join(f"Found on {self._text(2)}:\n{document}" for document in ranked)
        return [system, {"role": "user", "content": f"{documents}\n\n{self._text(12)}?"}]

    def _question(self) -> dict[str, str]:
        return {"role": "user", "content": f"{self._text(10)}?"}

    def _request(self, at: datetime, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"timestamp": at.isoformat(), "model": "assistant", "messages": messages}

    def _text(self, words: int) -> str:
        return " ".join("".join(self._random.choices(SYLLABLES, k=self._random.randint(1, 4))) for _ in range(words))


def as_lines(n: int) -> str:
    """A log of ``n`` questions and what follows them."""
    return "".join(json.dumps(request) + "\n" for request in HelpDesk().requests(n))
