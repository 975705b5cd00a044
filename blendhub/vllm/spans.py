"""Arithmetic on spans: how the tokens to compute are joined, sampled, cut for forwards, and scored."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from blendhub.core.spans import Span


def clipped(span: Span, limits: Span) -> Span:
    start = max(span.start, limits.start)
    return Span(start, max(start, min(span.end, limits.end)))


def overlaps(some: Sequence[Span], others: Sequence[Span]) -> Iterator[tuple[int, int, Span]]:
    """The overlaps of two lists of ascending, disjoint spans: the numbers of both spans, and where they overlap."""
    first = 0
    for number, span in enumerate(some):
        while first < len(others) and others[first].end <= span.start:
            first += 1
        for at in range(first, len(others)):
            if others[at].start >= span.end:
                break
            yield number, at, clipped(others[at], span)


def sampled(span: Span, group_tokens: int, share: float) -> list[Span]:
    """The first tokens of every ``group_tokens`` neighbours, enough to make up the share."""
    if share == 1:
        return [span]
    taken = math.ceil(group_tokens * share)
    starts = range(span.start, span.end, group_tokens)
    return [Span(start, min(start + taken, span.end)) for start in starts]


def cut(spans: Sequence[Span], n_tokens: int) -> list[Span]:
    """The first tokens of the spans, as many as there are, or ``n_tokens``."""
    taken: list[Span] = []
    for span in spans:
        if n_tokens <= 0:
            break
        taken.append(Span(span.start, min(span.end, span.start + n_tokens)))
        n_tokens -= len(taken[-1])
    return taken


def cut_at(spans: Sequence[Span], borders: Sequence[int]) -> list[Span]:
    """The spans, cut at these ascending positions."""
    parts: list[Span] = []
    for span in spans:
        within = [span.start, *(border for border in borders if span.start < border < span.end), span.end]
        parts += map(Span, within, within[1:])
    return parts


def behind(spans: Sequence[Span], position: int) -> list[Span]:
    """The parts of the spans at or after this position."""
    return [Span(max(span.start, position), span.end) for span in spans if span.end > position]


def spread(scores: npt.NDArray[np.float32], group: int, probed: int) -> None:
    """Score the tokens of each group that were not probed with the mean of those that were."""
    whole = len(scores) // group * group
    groups = scores[:whole].reshape(-1, group)
    groups[:, probed:] = groups[:, :probed].mean(axis=1, keepdims=True)
    rest = scores[whole:]
    if len(rest) > probed:
        rest[probed:] = rest[:probed].mean()
