"""Is an answer true, and does it leave out nothing that was promised? Both are judged by the reference."""

from collections.abc import Sequence

import numpy as np

from blendhub.contracts.matcher import Matcher
from blendhub.core.spans import Match, Span, check_tiling, gaps
from blendhub.core.tokens import TokenBuffer, Tokens, as_tokens
from blendhub.testing.reference import ReferenceMatcher


def check_matches(prompt: TokenBuffer, matches: Sequence[Match], stored: ReferenceMatcher) -> None:
    """Raise AssertionError unless every match is true, whatever the matcher's reach."""
    tokens = as_tokens(prompt)
    check_tiling(len(tokens), matches)
    for match in matches:
        complaint = _complaint(tokens, match, stored)
        assert not complaint, f"{match}: {complaint}"


def check_complete(prompt: TokenBuffer, matches: Sequence[Match], stored: ReferenceMatcher) -> None:
    """Raise AssertionError if the matches leave out what a matcher of this reach and guarantee must find.

    Where stretches overlap, a matcher may cut one to keep another whole. What is left of a stretch may then
    be too short to be certain; but nothing as long as the guarantee may stay uncovered.
    """
    tokens = as_tokens(prompt)
    certain = stored.guaranteed_tokens
    tolerated = certain if stored.reach == "anywhere" else 1
    spans = [match.span for match in matches]
    owed_spans = [match.span for match in stored.candidates(tokens)]
    if stored.reach == "prefix" and owed_spans:
        owed_spans = [Span(0, owed_spans[-1].end)]
    for owed in owed_spans:
        missed = [gap for gap in gaps(owed, spans) if len(gap) >= tolerated]
        assert not missed, f"{missed} of the stored tokens at {owed} of the prompt not found; found only {spans}"


def covers(matches: Sequence[Match], span: Span) -> bool:
    """Whether the matches cover every token of ``span``."""
    return not list(gaps(span, [match.span for match in matches]))


def touches(matches: Sequence[Match], span: Span) -> bool:
    """Whether the matches cover any token of ``span``."""
    return any(match.span.start < span.end and span.start < match.span.end for match in matches)


def _complaint(prompt: Tokens, match: Match, stored: ReferenceMatcher) -> str | None:
    if any(type(number) is not int for number in (match.run, match.source_start, match.span.start, match.span.end)):
        return "its numbers must be plain Python integers, or it cannot be sent"
    if type(match.exact) is not bool:
        return f"exact must be a bool, got {match.exact!r}"
    run = stored.runs.get(match.run)
    if run is None:
        return "no such run is stored"
    source = Span(match.source_start, match.source_start + len(match.span))
    if not run.holds(source):
        return f"not all of {source} of the run is stored"
    if not np.array_equal(run.tokens[source.start : source.end], prompt[match.span.start : match.span.end]):
        return f"the run holds other tokens at {source}"
    if match.exact and match.source_start != match.span.start:
        return "marked exact, but the run holds these tokens at other positions"
    if match.exact and not run.is_exact(match.span, prompt):
        return "marked exact, but the prompt begins otherwise or the run was stored as blended"
    return None


class MatcherWithOracle:
    """The matcher under test and the reference: both get the same calls, and every answer is judged."""

    def __init__(self, matcher: Matcher, separator: tuple[int, ...]) -> None:
        self.matcher = matcher
        self.reference = ReferenceMatcher(matcher.reach, matcher.guaranteed_tokens, separator)

    def add(self, run: int, tokens: Tokens, span: Span | None = None, exact: bool = True) -> None:
        """Store ``span``, or all of the tokens."""
        span, tokens = span or Span(0, len(tokens)), as_tokens(tokens)
        self.reference.add(run, tokens, span, exact)
        self.matcher.add(run, tokens, span, exact)
        assert len(self.matcher) == len(self.reference), f"wrong number of stored tokens after adding {span}"

    def discard(self, run: int, span: Span) -> None:
        self.reference.discard(run, span)
        self.matcher.discard(run, span)
        assert len(self.matcher) == len(self.reference), f"wrong number of stored tokens after discarding {span}"

    def match(self, prompt: Tokens) -> list[Match]:
        """The matcher's answer, found to be true and complete."""
        prompt = as_tokens(prompt)
        matches = self.matcher.match(prompt)
        check_matches(prompt, matches, self.reference)
        check_complete(prompt, matches, self.reference)
        return matches
