"""Which tokens are computed in which forward: pure arithmetic on spans."""

import math
from collections.abc import Iterator, Sequence

from blendhub.plan import Span


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


def sampled(span: Span, group_tokens: int, share: float) -> list[Span]:
    """Of every ``group_tokens`` neighbours the first ones, so many that they are the share."""
    if share == 1:
        return [span]
    taken = math.ceil(group_tokens * share)
    starts = range(span.start, span.end, group_tokens)
    return [Span(start, min(start + taken, span.end)) for start in starts]


def pieces(runs: Sequence[Span], max_tokens: int, max_runs: int) -> Iterator[list[Span]]:
    """The runs cut into groups, each within both limits, in the order of their positions."""
    piece: list[Span] = []
    room = max_tokens
    for run in runs:
        start = run.start
        while start < run.end:
            end = min(run.end, start + room)
            piece.append(Span(start, end))
            room -= end - start
            start = end
            if not room or len(piece) == max_runs:
                yield piece
                piece, room = [], max_tokens
    if piece:
        yield piece


def total(runs: Sequence[Span]) -> int:
    return sum(len(run) for run in runs)
