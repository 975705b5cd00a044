"""A span that does not fit what is stored is refused with InvalidInput, and nothing changes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from blendhub.contracts.matcher import Matcher
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.sentences import holds


@holds("A span that does not fit what is stored raises")
class MatcherRefusingTests(MatcherTests):
    """The suite stores a run 1 whose last ten tokens are still to come."""

    @pytest.fixture
    def text(self, matcher: Matcher, writer: Writer) -> Tokens:
        text = writer.text()
        matcher.add(1, text, Span(0, len(text) - 10))
        return text

    @contextmanager
    def refused(self, matcher: Matcher, probe: Tokens) -> Iterator[None]:
        """Assert that the enclosed call raises InvalidInput with a sentence, and leaves the matcher as it was."""
        before = len(matcher), matcher.nbytes, matcher.match(probe)
        with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
            yield
        assert (len(matcher), matcher.nbytes, matcher.match(probe)) == before

    @holds("A run grows at its end only: a later span starts where the last span ended,")
    def test_refuses_growth_anywhere_but_at_the_end(self, matcher: Matcher, text: Tokens) -> None:
        end = len(text) - 10
        for span in (Span(end + 1, end + 3), Span(end - 1, end + 3), Span(0, end), Span(0, end + 1)):
            with self.refused(matcher, text):
                matcher.add(1, text, span)
        matcher.discard(1, Span(end - 4, end))
        with self.refused(matcher, text):
            matcher.add(1, text, Span(end - 4, end))
        matcher.add(1, text, Span(end, end + 1))

    @holds("The whole span must be stored.")
    def test_refuses_to_discard_what_is_not_stored(self, matcher: Matcher, text: Tokens) -> None:
        end = len(text) - 10
        matcher.discard(1, Span(4, 8))
        matcher.add(5, text, Span(10, 20))
        gone_or_never_stored = [(2, Span(0, 1)), (5, Span(0, 1)), (5, Span(9, 11)), (5, Span(0, 20))]
        parts = (Span(end - 1, end + 1), Span(end, end + 1), Span(5, 6), Span(0, 5), Span(7, 12), Span(0, end))
        for run, span in [*gone_or_never_stored, *((1, span) for span in parts)]:
            with self.refused(matcher, text):
                matcher.discard(run, span)
        matcher.discard(5, Span(10, 20))
        with self.refused(matcher, text):
            matcher.discard(5, Span(10, 20))
