"""Counts over many prompts: what is reused of them, and the times that follow from it."""

import msgspec


class ReusedTokens(msgspec.Struct):
    """Prompts, their tokens, and how many of these are reused."""

    requests: int = 0
    tokens: int = 0
    prefix: int = 0
    """By a prefix cache alone."""
    exact: int = 0
    moved: int = 0
    """By the hub: bit for bit, and at another place or behind other text."""

    def add(self, tokens: int, prefix: int, exact: int, moved: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.prefix += prefix
        self.exact += exact
        self.moved += moved

    @property
    def anywhere(self) -> int:
        return self.exact + self.moved


DOCUMENTS, DOCUMENT, BETWEEN, QUESTION = 7, 512, 26, 64
PROMPT = DOCUMENTS * (DOCUMENT + BETWEEN) + QUESTION

EXACT = 0.049
"""Time relative to full prefill, where every token but those of the question is exact."""

MOVED = 0.277
"""The documents are moved, and 15% of their tokens are recomputed, picked by the default selector."""

_HELD = (PROMPT - QUESTION) / PROMPT
_DOCUMENTS = DOCUMENTS * DOCUMENT / PROMPT


class Costs(msgspec.Struct, frozen=True):
    """What a token costs, relative to a computed one."""

    exact: float
    moved: float
    of_user: bool = True
    """Whether the user measured the costs; if not, they are those of another model."""

    def ratio(self, tokens: int, exact: int, moved: int, settled: int = 0) -> float:
        """The time of a prompt, relative to that of its full prefill. Settled text is loaded like exact text."""
        computed = tokens - exact - moved - settled
        return (computed + self.exact * (exact + settled) + self.moved * moved) / tokens if tokens else 1.0

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
