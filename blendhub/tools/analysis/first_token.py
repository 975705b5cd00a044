"""The time to the first token that reuse would leave, from what reused tokens cost in real vLLM.

A prompt's time is taken to be the sum of what its tokens cost: computed, exact and moved ones each their part. Where
attention costs more the longer the prompt is, reuse saves more than that. What the user has measured counts; otherwise
it is what ``docs/measurements.md`` has of one small model: seven documents, text before each, and a question.
"""

import msgspec

DOCUMENTS, DOCUMENT, BETWEEN, QUESTION = 7, 512, 26, 64
PROMPT = DOCUMENTS * (DOCUMENT + BETWEEN) + QUESTION

EXACT = 0.049
"""Time relative to full prefill, where every token but those of the question is exact."""

MOVED = 0.306
"""The documents are moved, and 15% of their tokens are recomputed, picked by the default selector."""

_HELD = (PROMPT - QUESTION) / PROMPT
_DOCUMENTS = DOCUMENTS * DOCUMENT / PROMPT


class Costs(msgspec.Struct, frozen=True):
    """What a token costs, relative to a computed one."""

    exact: float
    moved: float
    of_user: bool = True
    """Whether the user measured the costs; if not, they are those of another model."""

    def ratio(self, tokens: int, exact: int, moved: int) -> float:
        """The time of a prompt, relative to that of its full prefill."""
        computed = tokens - exact - moved
        return (computed + self.exact * exact + self.moved * moved) / tokens if tokens else 1.0

    def sentence(self) -> str:
        source = "as you measured" if self.of_user else "as measured with another model; --token-costs takes yours"
        exact, moved = f"an exact token is taken to cost {self.exact:.2f}", f"a moved token {self.moved:.2f}"
        return f"{exact} of a computed one, {moved}, {source}"


MEASURED = Costs((EXACT - (1 - _HELD)) / _HELD, (MOVED - (1 - _DOCUMENTS)) / _DOCUMENTS, of_user=False)


class Ratios:
    """The ratios of many prompts, in thousandths."""

    STEPS = 1000

    def __init__(self) -> None:
        self._counts = [0] * (self.STEPS + 1)
        self._total = 0

    def add(self, ratio: float) -> None:
        self._counts[min(round(ratio * self.STEPS), self.STEPS)] += 1
        self._total += 1

    def quantile(self, part: float) -> float:
        """The ratio that this part of the prompts reaches or stays below; 1 if there are no prompts."""
        left = part * self._total
        for step, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return step / self.STEPS
        return 1.0
