"""What became of each token of a prompt."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

import msgspec
import numpy as np

from blendhub.plan import Span


class Fate(StrEnum):
    """Where a token's KV comes from."""

    CACHED = "cached"
    EXACT = "exact"
    MOVED = "moved"
    RECOMPUTED = "recomputed"
    HOLE = "hole"
    COMPUTED = "computed"

    @property
    def label(self) -> str:
        return LABELS[self]


LABELS = {
    Fate.CACHED: "in vLLM's own cache",
    Fate.EXACT: "reused exactly",
    Fate.MOVED: "moved, kept",
    Fate.RECOMPUTED: "moved, recomputed",
    Fate.HOLE: "in holes, computed",
    Fate.COMPUTED: "computed by vLLM",
}
FATES = list(Fate)


class Stretch(msgspec.Struct, frozen=True):
    """Neighbours of one fate."""

    span: Span
    fate: Fate


def paint(n_tokens: int, cached: int, spans: Mapping[Fate, Sequence[Span]]) -> list[Stretch]:
    """The whole prompt in stretches: computed by vLLM, but for its first ``cached`` tokens and for ``spans``.

    Of spans that overlap, the later one counts.
    """
    fates = np.full(n_tokens, FATES.index(Fate.COMPUTED))
    fates[:cached] = FATES.index(Fate.CACHED)
    for fate, those in spans.items():
        for span in those:
            fates[span.start : span.end] = FATES.index(fate)
    borders = [0, *(np.flatnonzero(np.diff(fates)) + 1).tolist(), n_tokens]
    return [Stretch(Span(start, end), FATES[fates[start]]) for start, end in pairwise(borders)]


def count(plan: Sequence[Stretch]) -> dict[Fate, int]:
    """How many tokens met which fate."""
    return {fate: sum(len(one.span) for one in plan if one.fate is fate) for fate in Fate}
