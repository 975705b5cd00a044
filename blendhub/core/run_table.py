"""Which tokens of which runs are stored: bookkeeping that the contract asks of every matcher.

A helper for authors of matchers; one that tracks its runs in another way does not need it.
"""

from bisect import bisect_right

from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span, gaps


class MatcherRun:
    """The stored parts of one run, and the position at which it may grow."""

    def __init__(self, start: int) -> None:
        self.end = start
        self.parts: list[Span] = []


class RunTable:
    """All runs of a matcher. Every check comes before the first change, so an error leaves all as it was."""

    def __init__(self) -> None:
        self._runs: dict[int, MatcherRun] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, run: int) -> bool:
        return run in self._runs

    def check_add(self, run: int, span: Span) -> None:
        """Raise InvalidInput unless the run is new or ends where ``span`` starts."""
        known = self._runs.get(run)
        if known and span.start != known.end:
            raise InvalidInput(f"run {run} grows at its end only, at {known.end}, not at {span.start}")

    def add(self, run: int, span: Span) -> None:
        known = self._runs.setdefault(run, MatcherRun(span.start))
        if known.parts and known.parts[-1].end == span.start:
            known.parts[-1] = Span(known.parts[-1].start, span.end)
        else:
            known.parts.append(span)
        known.end = span.end
        self.tokens += len(span)

    def discard(self, run: int, span: Span) -> None:
        """Drop a part; a run without parts is forgotten. Raises InvalidInput unless all of it is stored."""
        if not self.holds(run, span):
            raise InvalidInput(f"cannot discard {span} of run {run}: not all of it is stored")
        known = self._runs[run]
        at = self._part(known, span.start)
        part = known.parts[at]
        known.parts[at : at + 1] = gaps(part, [span])
        self.tokens -= len(span)
        if not known.parts:
            del self._runs[run]

    def holds(self, run: int, span: Span) -> bool:
        """Whether all of ``span`` is stored."""
        known = self._runs.get(run)
        if known is None:
            return False
        at = self._part(known, span.start)
        return at >= 0 and span.end <= known.parts[at].end

    @staticmethod
    def _part(known: MatcherRun, position: int) -> int:
        return bisect_right(known.parts, position, key=lambda part: part.start) - 1
