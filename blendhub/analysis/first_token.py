"""The time to the first token that reuse would leave, from ratios that were measured in real vLLM.

``docs/measurements.md`` has the measurements: prompts of seven documents, text before each, and a question. A prompt's
time is taken to be the sum of what its tokens cost: computed ones, exact ones and moved ones each their part. Where
attention costs more the longer the prompt is, reuse saves more than that.
"""

DOCUMENTS, DOCUMENT, BETWEEN, QUESTION = 7, 512, 26, 64
PROMPT = DOCUMENTS * (DOCUMENT + BETWEEN) + QUESTION

EXACT = 0.049
"""Time by full prefill's: all but the question is exact."""

MOVED = 0.306
"""The documents are moved, and 15% of their tokens are recomputed, picked by the default selector."""

_HELD = (PROMPT - QUESTION) / PROMPT
COST_OF_EXACT = (EXACT - (1 - _HELD)) / _HELD
"""What an exact token costs, by a computed one."""

_DOCUMENTS = DOCUMENTS * DOCUMENT / PROMPT
COST_OF_MOVED = (MOVED - (1 - _DOCUMENTS)) / _DOCUMENTS


def ratio(tokens: int, exact: int, moved: int) -> float:
    """The time by that of a full prefill."""
    computed = tokens - exact - moved
    return (computed + COST_OF_EXACT * exact + COST_OF_MOVED * moved) / tokens if tokens else 1.0


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
        """The ratio that this part of the prompts stays below or reaches; 1 if there are none."""
        left = part * self._total
        for step, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return step / self.STEPS
        return 1.0
