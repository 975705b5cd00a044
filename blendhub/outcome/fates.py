"""The fate of each token of a prompt: the words and colours of every strip, in terminals, pages and pictures."""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice, pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub.core.spans import Match, Span


class Fate(StrEnum):
    """Where a token's KV comes from."""

    CACHED = "cached"
    EXACT = "exact"
    SETTLED = "settled"
    MOVED = "moved"
    RECOMPUTED = "recomputed"
    HOLE = "hole"
    COMPUTED = "computed"

    @property
    def label(self) -> str:
        return LABELS[self]


def fate_of(match: Match) -> Fate:
    """The fate of the tokens of a match that is reused as it was found."""
    return Fate.EXACT if match.exact else Fate.SETTLED if match.settled else Fate.MOVED


LABELS = {
    Fate.CACHED: "in vLLM's own cache",
    Fate.EXACT: "reused exactly",
    Fate.SETTLED: "settled, kept",
    Fate.MOVED: "moved, kept",
    Fate.RECOMPUTED: "moved, recomputed",
    Fate.HOLE: "in holes, computed",
    Fate.COMPUTED: "computed by vLLM",
}
FATES = list(Fate)

# Okabe and Ito's colours, which people of every colour vision tell apart: cold ones are reused, warm ones computed.
COLOURS = {
    Fate.CACHED: "#0072B2",
    Fate.EXACT: "#56B4E9",
    Fate.SETTLED: "#CC79A7",
    Fate.MOVED: "#009E73",
    Fate.RECOMPUTED: "#F0E442",
    Fate.HOLE: "#D55E00",
    Fate.COMPUTED: "#BBBBBB",
}

LETTERS = {
    Fate.CACHED: "V",
    Fate.EXACT: "=",
    Fate.SETTLED: "s",
    Fate.MOVED: ">",
    Fate.RECOMPUTED: "r",
    Fate.HOLE: "o",
    Fate.COMPUTED: ".",
}
"""The letters of fates, for terminals without colours."""

WHY = {
    Fate.CACHED: "vLLM still had the KV of these tokens in its own prefix cache",
    Fate.EXACT: "stored KV of the same tokens at the same positions after the same text",
    Fate.SETTLED: "KV that was blended before, and is reused as it is behind the same whole text",
    Fate.MOVED: "stored KV of the same tokens, turned to their new positions",
    Fate.RECOMPUTED: "reused text that the selector chose to recompute, in its new context",
    Fate.HOLE: "no stored KV was used for these tokens, which stand between reused ones",
    Fate.COMPUTED: "vLLM computed these tokens itself, as it does without BlendHub",
}


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring tokens of one fate."""

    span: Span
    fate: Fate


OF_SPANS = {
    "exact": Fate.EXACT,
    "settled": Fate.SETTLED,
    "moved": Fate.MOVED,
    "recomputed": Fate.RECOMPUTED,
    "holes": Fate.HOLE,
}
"""The fates of the spans in a request's report, by the spans' names there; of spans that overlap, the later one
counts."""


def strip_of(n_tokens: int, cached: int, spans: Mapping[str, Sequence[Span]]) -> list[Stretch]:
    """The whole prompt in stretches: computed by vLLM, but for its first ``cached`` tokens and for ``spans``."""
    fates = np.full(n_tokens, FATES.index(Fate.COMPUTED), np.int8)
    fates[:cached] = FATES.index(Fate.CACHED)
    for name, fate in OF_SPANS.items():
        for span in spans.get(name, ()):
            fates[span.start : span.end] = FATES.index(fate)
    return [Stretch(span, FATES[number]) for span, number in stretches_of(fates)]


def stretches_of(numbers: npt.NDArray[np.int8]) -> Iterator[tuple[Span, int]]:
    """The stretches of tokens with equal numbers, in order, each with its number."""
    if len(numbers):
        borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, end in pairwise(borders):
            yield Span(start, end), int(numbers[start])


def in_parts(plan: Sequence[Stretch], n_parts: int) -> list[Stretch]:
    """The prompt in parts of equal length, of at least a token; each part has the fate of most of its tokens."""
    n_tokens = plan[-1].span.end if plan else 0
    n_parts = min(n_parts, n_tokens)
    parts: list[Stretch] = []
    first = 0
    for number in range(n_parts):
        part = Span(n_tokens * number // n_parts, n_tokens * (number + 1) // n_parts)
        while plan[first].span.end <= part.start:
            first += 1
        tokens = dict.fromkeys(Fate, 0)
        for stretch in islice(plan, first, None):
            if stretch.span.start >= part.end:
                break
            tokens[stretch.fate] += min(stretch.span.end, part.end) - max(stretch.span.start, part.start)
        parts.append(Stretch(part, max(tokens, key=lambda fate: tokens[fate])))
    return parts


def shortened(plan: Sequence[Stretch], most: int) -> list[Stretch]:
    """The prompt in at most ``most`` stretches: these, or parts of equal length if they are more; see ``in_parts``."""
    if len(plan) <= most:
        return list(plan)
    result: list[Stretch] = []
    for part in in_parts(plan, most):
        if result and result[-1].fate is part.fate:
            part = Stretch(Span(result.pop().span.start, part.span.end), part.fate)
        result.append(part)
    return result


def count(plan: Sequence[Stretch]) -> dict[Fate, int]:
    """The number of tokens of each fate."""
    return {fate: sum(len(stretch.span) for stretch in plan if stretch.fate is fate) for fate in Fate}
