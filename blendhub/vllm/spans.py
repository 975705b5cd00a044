"""Arithmetic on spans: how the tokens to compute are joined, sampled and cut for forwards."""

import math
from collections.abc import Iterator, Sequence

from blendhub.plan import Span


def clipped(span: Span, limits: Span) -> Span:
    start = max(span.start, limits.start)
    return Span(start, max(start, min(span.end, limits.end)))


def joined(spans: Sequence[Span]) -> list[Span]:
    """The same tokens as disjoint, ascending spans that do not touch."""
    result: list[Span] = []
    for span in sorted(spans):
        if not len(span):
            continue
        if result and span.start <= result[-1].end:
            result[-1] = Span(result[-1].start, max(span.end, result[-1].end))
        else:
            result.append(span)
    return result


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What ascending, disjoint spans and others like them have in common."""
    return [span for _, _, span in overlaps(some, others)]


def overlaps(some: Sequence[Span], others: Sequence[Span]) -> Iterator[tuple[int, int, Span]]:
    """Which of ascending, disjoint spans overlap which of others like them, by their numbers, and where."""
    first = 0
    for number, span in enumerate(some):
        while first < len(others) and others[first].end <= span.start:
            first += 1
        for at in range(first, len(others)):
            if others[at].start >= span.end:
                break
            yield number, at, clipped(others[at], span)


def sampled(span: Span, group_tokens: int, share: float) -> list[Span]:
    """Of every ``group_tokens`` neighbours the first ones, so many that they are the share."""
    if share == 1:
        return [span]
    taken = math.ceil(group_tokens * share)
    starts = range(span.start, span.end, group_tokens)
    return [Span(start, min(start + taken, span.end)) for start in starts]


def batches(spans: Sequence[Span], max_tokens: int, max_spans: int) -> Iterator[list[Span]]:
    """The spans cut into batches, each within both limits, in the order of their positions."""
    batch: list[Span] = []
    left = max_tokens
    for span in spans:
        start = span.start
        while start < span.end:
            end = min(span.end, start + left)
            batch.append(Span(start, end))
            left -= end - start
            start = end
            if not left or len(batch) == max_spans:
                yield batch
                batch, left = [], max_tokens
    if batch:
        yield batch


def total(spans: Sequence[Span]) -> int:
    return sum(len(span) for span in spans)
