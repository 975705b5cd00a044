"""Audits a sample of blends: documents in new orders, whose answers begin from blended KV and from exact KV."""

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from blendhub.outcome.agreement import wilson
from blendhub.tools.warm.documents import Document
from blendhub.tools.warm.neighbours import WORD
from blendhub.tools.warm.prompts import Part, Prompts
from blendhub.tools.warm.warming import Warming

BLENDED = (3, 6)
"""So many documents stand in one prompt."""
AUDITED = {"audit": True, "settled": False, "store": False}
QUESTION = "What do the texts above say about {}?"
SHORT = 4
"""A question is about a word of more letters."""


class Agreement(NamedTuple):
    agreed: int
    audits: int
    others: int
    """Prompts that were not audited."""
    reason: str
    """Why the first of these was not; empty if all were, or if nothing was moved."""

    def __str__(self) -> str:
        reason = self.reason or "nothing was moved"
        if not self.audits:
            return f"No blend was audited: {reason}."
        low, high = wilson(self.agreed, self.audits)
        return (
            f"{self.agreed} of {self.audits} blends agree with full prefill on the first token: "
            f"{self.agreed / self.audits:.0%}, and with 95% confidence {low:.0%} to {high:.0%} of such prompts."
            + (f" {self.others} more prompts were not audited: {reason}." if self.others else "")
        )


def verify(
    warming: Warming, prompts: Prompts, documents: Sequence[Document], blends: int, advance: Callable[[], object]
) -> Agreement:
    """Audit so many blends, or fewer if the work is stopped. One corpus always gives the same prompts."""
    rng = random.Random(len(documents))
    ready = [number for number, parts in enumerate(warming.parts) if parts]
    agreed = audits = others = 0
    reason = ""
    for _ in range(blends if ready else 0):
        if warming.is_stopped:
            break
        chosen = rng.sample(ready, min(len(ready), rng.randint(*BLENDED)))
        parts: list[Part] = [rng.choice(warming.parts[number]) for number in chosen]
        prompt = prompts.asking(parts, _question(rng, documents[chosen[0]]))
        report = warming.complete(prompt, AUDITED).report
        if audit := report.get("audit"):
            audits += 1
            agreed += bool(audit["agrees"])
        else:
            others += 1
            reason = reason or str(report.get("reason") or "")
        advance()
    return Agreement(agreed, audits, others, reason)


def _question(rng: random.Random, document: Document) -> str:
    words = sorted({word for word in re.findall(WORD, document.text) if len(word) > SHORT})
    return QUESTION.format(rng.choice(words) if words else "this")
