"""Finds KV again behind the whole prefix that it was computed or blended behind: *settled* KV.

One more matcher of the namespace's own that finds prefixes has all runs that are not exact. To it they are exact, which
means just that: same tokens, same positions, same whole prefix.
"""

from collections.abc import Callable, Mapping

from blendhub.contracts import Matcher
from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens


class _Held:
    """The stored spans of a run that the matcher knows."""

    __slots__ = ("ratio", "tokens")

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.tokens = 0


class SettledMatches:
    """The settled KV of one namespace. ``match``, ``add`` and ``discard`` are parts of a queue's work."""

    def __init__(self, new_matcher: Callable[[], Matcher] | None) -> None:
        """``new_matcher`` makes a matcher that finds prefixes; None if the namespace has none."""
        self._new_matcher = new_matcher
        self._matcher: Matcher | None = None
        """The matcher, made when it is needed: each cache_salt makes a namespace, and many blend nothing."""
        self._held: dict[int, _Held] = {}

    @property
    def can_match(self) -> bool:
        return self._new_matcher is not None

    @property
    def nbytes(self) -> int:
        return self._matcher.nbytes if self._matcher else 0

    def match(self, tokens: Tokens, least_ratio: float) -> list[Match]:
        """The KV behind its whole prefix in the prompt that was blended with at least this share recomputed."""
        if not self._held or not self._matcher:
            return []
        return [
            Match(match.span, match.run, match.source_start, False, settled=True)
            for match in self._matcher.match(tokens)
            if match.exact and self._held[match.run].ratio >= least_ratio
        ]

    def add(self, run: int, ratio: float, tokens: Tokens, span: Span) -> None:
        """Add KV of a run that is not exact, of which this share was recomputed."""
        if not self._new_matcher:
            return
        self._matcher = self._matcher or self._new_matcher()
        self._matcher.add(run, tokens, span)
        self._held.setdefault(run, _Held(ratio)).tokens += len(span)

    def discard(self, run: int, span: Span) -> None:
        held = self._held.get(run)
        if held is None or not self._matcher:
            return
        self._matcher.discard(run, span)
        held.tokens -= len(span)
        if not held.tokens:
            del self._held[run]

    def check_integrity(self, stored: Mapping[int, int]) -> None:
        """``stored``: the tokens of each run that is not exact."""
        if not self.can_match:
            assert not self._held
            return
        assert {run: held.tokens for run, held in self._held.items()} == stored, "settled matches know other runs"
        assert len(self._matcher or ()) == sum(stored.values())
