"""Finds KV again behind the whole prefix that it was computed or blended behind: *settled* KV.

One more matcher of the namespace's own that finds prefixes has all runs that are not exact. To it they are exact, which
means just that: same tokens, same positions, same whole prefix.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from blendhub.contracts import Matcher
from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens


class SettledMatches:
    """The settled KV of one namespace. ``match``, ``add`` and ``discard`` are parts of a queue's work."""

    def __init__(self, new_matcher: Callable[[], Matcher] | None) -> None:
        """``new_matcher`` makes a matcher that finds prefixes; None if the namespace has none."""
        self._new_matcher = new_matcher
        self._matcher: Matcher | None = None
        """The matcher, made when it is needed: each cache_salt makes a namespace, and many blend nothing."""
        self._ratios: dict[int, float] = {}
        """The share of each run that was recomputed."""
        self._tokens: Counter[int] = Counter()
        """How many tokens of each run are stored."""

    @property
    def can_match(self) -> bool:
        return self._new_matcher is not None

    @property
    def nbytes(self) -> int:
        return self._matcher.nbytes if self._matcher else 0

    def match(self, tokens: Tokens, least_ratio: float) -> list[Match]:
        """The KV behind its whole prefix in the prompt that was blended with at least this share recomputed."""
        if not self._ratios or not self._matcher:
            return []
        return [
            Match(match.span, match.run, match.source_start, False, settled=True)
            for match in self._matcher.match(tokens)
            if match.exact and self._ratios[match.run] >= least_ratio
        ]

    def add(self, run: int, ratio: float, tokens: Tokens, span: Span) -> None:
        """Add KV of a run that is not exact, of which this share was recomputed."""
        if not self._new_matcher:
            return
        self._matcher = self._matcher or self._new_matcher()
        self._matcher.add(run, tokens, span)
        self._ratios[run] = ratio
        self._tokens[run] += len(span)

    def discard(self, run: int, span: Span) -> None:
        if run not in self._ratios or not self._matcher:
            return
        self._matcher.discard(run, span)
        self._tokens[run] -= len(span)
        if not self._tokens[run]:
            del self._ratios[run], self._tokens[run]

    def check_integrity(self, stored: Mapping[int, int]) -> None:
        """``stored``: the tokens of each run that is not exact."""
        if not self.can_match:
            assert not self._ratios
            return
        assert self._tokens == stored, "settled matches know other runs"
        assert len(self._matcher or ()) == sum(stored.values())
