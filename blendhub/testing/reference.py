"""A slow and simple matcher, by which the answers of others are judged.

It keeps every run whole, compares every position of a prompt with every position of every run, and hashes
nothing. The conformance suite makes the same calls to it and to the matcher under test.
"""

import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from blendhub.contracts.matcher import Matcher, Reach
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens

Flags = npt.NDArray[np.bool_]


class ReferenceRun:
    """A run as it was added: its whole sequence, and for each position whether it is stored, and as exact."""

    def __init__(self, tokens: Tokens, start: int) -> None:
        self.tokens = tokens.copy()
        self.stored: Flags = np.zeros(len(tokens), bool)
        self.exact: Flags = np.zeros(len(tokens), bool)
        self.approximate = False
        """Whether anything was added that is not exact."""
        self.end = start

    def grow(self, tokens: Tokens, span: Span, exact: bool) -> None:
        """Store ``span``; the positions before the span stay as they were."""
        self.tokens = np.concatenate([self.tokens[: self.end], tokens[self.end :]])
        self.stored = np.concatenate([self.stored[: self.end], np.zeros(len(tokens) - self.end, bool)])
        self.exact = np.concatenate([self.exact[: self.end], np.zeros(len(tokens) - self.end, bool)])
        self.stored[span.start : span.end] = True
        self.exact[span.start : span.end] = exact
        self.approximate |= not exact
        self.end = span.end

    def holds(self, span: Span) -> bool:
        return span.end <= self.end and bool(self.stored[span.start : span.end].all())

    def is_exact(self, span: Span, prompt: Tokens) -> bool:
        """Whether the KV of these positions is what the engine would compute for this prompt."""
        same_prefix = np.array_equal(self.tokens[: span.end], prompt[: span.end])
        return same_prefix and bool(self.exact[span.start : span.end].all())


class ReferenceMatcher(Matcher):
    """Finds, within its reach, everything of at least ``guaranteed_tokens``."""

    def __init__(
        self, reach: Reach = "anywhere", guaranteed_tokens: int = 1, separator: tuple[int, ...] = (0,)
    ) -> None:
        self.reach = reach
        self.runs: dict[int, ReferenceRun] = {}
        self._guaranteed = guaranteed_tokens
        self._separator = np.array(separator, np.uint32)
        self._lock = threading.RLock()

    @property
    def guaranteed_tokens(self) -> int:
        return self._guaranteed

    def add(self, run: int, tokens: Tokens, span: Span, exact: bool = True) -> None:
        with self._lock:
            stored = self.runs.get(run) or ReferenceRun(tokens, span.start)
            if span.start != stored.end:
                raise InvalidInput(f"run {run} ends at {stored.end} and cannot grow by {span}; start there")
            stored.grow(tokens, span, exact)
            self.runs[run] = stored

    def discard(self, run: int, span: Span) -> None:
        with self._lock:
            stored = self.runs.get(run)
            if stored is None or not stored.holds(span):
                raise InvalidInput(f"{span} of run {run!r} is not stored; discard only what was added")
            stored.stored[span.start : span.end] = False
            if not stored.stored.any():
                del self.runs[run]

    def match(self, tokens: Tokens) -> list[Match]:
        with self._lock:
            chosen = self._furthest_first(self.candidates(tokens))
            return [piece for match in chosen for piece in self._split_by_exactness(match, tokens)]

    def __len__(self) -> int:
        return sum(int(run.stored.sum()) for run in self.runs.values())

    @property
    def nbytes(self) -> int:
        return sum(run.tokens.nbytes + run.stored.nbytes + run.exact.nbytes for run in self.runs.values())

    def candidates(self, prompt: Tokens) -> list[Match]:
        """Every stretch within reach that is long enough; they overlap, and none is marked exact yet."""
        if self.reach == "prefix":
            stored = self._stored_prefix(prompt)
            return stored if stored and stored[-1].span.end >= self._guaranteed else []
        if self.reach == "segments":
            return [match for match in self._equal_segments(prompt) if len(match.span) >= self._guaranteed]
        return [match for name, run in self.runs.items() for match in self._common_stretches(name, run, prompt)]

    def _stored_prefix(self, prompt: Tokens) -> list[Match]:
        pieces = []
        for name, run in self.runs.items():
            agreed = _agreement(run.tokens, prompt)
            pieces += [Match(span, name, span.start, False) for span in _spans_of(run.stored[:agreed])]
        return _without_gaps(self._furthest_first(pieces))

    def _common_stretches(self, name: int, run: ReferenceRun, prompt: Tokens) -> Iterator[Match]:
        """Each stretch of stored tokens that the run and the prompt have in common, at any shift between them."""
        width = len(run.tokens) + len(prompt)
        equal = np.zeros((len(run.tokens), width), bool)
        equal[::-1, : len(prompt)] = (run.tokens[:, None] == prompt) & run.stored[:, None]
        # Rows that are one shorter move each row one further to the right: a column holds one shift then.
        by_shift = equal.ravel()[: -len(run.tokens)].reshape(len(run.tokens), width - 1)[::-1]
        # A row that is never equal ends the stretches of one shift before those of the next begin.
        columns = np.vstack([by_shift, np.zeros(width - 1, bool)]).T
        for span in _spans_of(columns.ravel(), self._guaranteed):
            column, start = divmod(span.start, columns.shape[1])
            shifted = start + column - len(run.tokens) + 1
            yield Match(Span(shifted, shifted + len(span)), name, start, False)

    def _equal_segments(self, prompt: Tokens) -> Iterator[Match]:
        stored = [
            (name, segment, run.tokens[segment.start : segment.end])
            for name, run in self.runs.items()
            for segment in self.segments(run.tokens)
            if run.holds(segment)
        ]
        for span in self.segments(prompt):
            for name, segment, text in stored:
                if np.array_equal(prompt[span.start : span.end], text):
                    yield Match(span, name, segment.start, False)

    def segments(self, tokens: Tokens) -> list[Span]:
        """The text between separators; overlapping separators are read from the left, as str.split does."""
        width, start, spans = len(self._separator), 0, []
        windows = (
            np.lib.stride_tricks.sliding_window_view(tokens, width) if len(tokens) >= width else np.empty((0, width))
        )
        for at in np.flatnonzero((windows == self._separator).all(axis=1)).tolist():
            if at >= start:
                spans.append(Span(start, at))
                start = at + width
        return [span for span in [*spans, Span(start, len(tokens))] if len(span)]

    def _furthest_first(self, candidates: list[Match]) -> list[Match]:
        """Disjoint, ascending pieces: the match that reaches furthest, and of these an exact one, is followed to
        its end.
        """

        def rank(match: Match) -> tuple[int, bool]:
            return match.span.end, not self.runs[match.run].approximate

        furthest: dict[int, Match] = {}
        for match in candidates:
            start = match.span.start
            furthest[start] = max(furthest.get(start, match), match, key=rank)
        waiting = [furthest[start] for start in sorted(furthest)]
        chosen: list[Match] = []
        at = 0
        while waiting := [match for match in waiting if match.span.end > at]:
            at = max(at, waiting[0].span.start)
            best = max((match for match in waiting if match.span.start <= at), key=rank)
            chosen.append(best.part(at, best.span.end))
            at = best.span.end
        return chosen

    def _split_by_exactness(self, match: Match, prompt: Tokens) -> Iterator[Match]:
        run = self.runs[match.run]
        agreed = _agreement(run.tokens, prompt) if match.source_start == match.span.start else 0
        flags = run.exact[match.source_start : match.source_start + len(match.span)].copy()
        flags[max(0, agreed - match.span.start) :] = False
        borders = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(flags))), len(flags)]
        for start, end in pairwise(borders):
            piece = match.part(match.span.start + start, match.span.start + end)
            yield Match(piece.span, piece.run, piece.source_start, bool(flags[start]))


def _agreement(left: Tokens, right: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(left), len(right))
    differing = np.flatnonzero(left[:length] != right[:length])
    return int(differing[0]) if len(differing) else length


def _spans_of(flags: Flags, at_least: int = 1) -> list[Span]:
    """The spans, long enough, over which the flags are set."""
    if np.count_nonzero(flags) < at_least:
        return []
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).reshape(-1, 2)
    return [Span(start, end) for start, end in edges[edges[:, 1] - edges[:, 0] >= at_least].tolist()]


def _without_gaps(pieces: list[Match]) -> list[Match]:
    """The pieces that cover the prompt from position 0 on, up to the first gap."""
    end = 0
    for count, piece in enumerate(pieces):
        if piece.span.start > end:
            return pieces[:count]
        end = piece.span.end
    return pieces
