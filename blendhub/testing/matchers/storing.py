"""What a matcher keeps, how runs go, what is left of the memory that they took; and which spans are refused."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from blendhub.contracts.matcher import Matcher
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.testing.checks import MatcherWithOracle, check_matches, covers
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.reference import ReferenceMatcher
from blendhub.testing.sentences import holds

SLACK = 1.5
"""How far memory may vary between equal amounts stored: tables grow in steps. A leak shows as a multiple."""


@holds("They are disjoint, ascending, not empty and name only tokens that are stored")
class StoringTests(MatcherTests):
    """Runs grow at their end, shrink anywhere, and leave nothing behind."""

    @holds("the matcher keeps its own copy of what it needs.")
    def test_the_matcher_keeps_its_own_copy(self, checked: MatcherWithOracle, writer: Writer) -> None:
        text = writer.text()
        buffer = text.copy()
        checked.add(1, buffer)
        buffer[:] = writer.text()
        assert covers(checked.match(text), Span(0, len(text)))
        assert checked.match(buffer) == []

    @holds("When the last token is discarded, the caller may use the id again for another")
    def test_an_id_can_be_used_again(self, checked: MatcherWithOracle, writer: Writer) -> None:
        first, second = writer.text(), writer.text(2 * writer.length)
        checked.add(2**63 - 1, first)
        checked.discard(2**63 - 1, Span(0, len(first)))
        checked.add(2**63 - 1, second, Span(9, len(second)))
        assert checked.match(first) == []
        checked.match(second)

    @holds("The index grows as needed.")
    def test_many_runs_are_all_found(self, checked: MatcherWithOracle, writer: Writer) -> None:
        """Enough to make every table grow several times; each answer is judged by its own run."""
        matcher = checked.matcher
        texts = [writer.text() for _ in range(self.entries)]
        for run, text in enumerate(texts):
            matcher.add(run, text, Span(0, len(text)))
        assert len(matcher) == sum(map(len, texts))
        for run, text in enumerate(texts):
            alone = ReferenceMatcher()
            alone.add(run, text, Span(0, len(text)))
            matches = matcher.match(text)
            check_matches(text, matches, alone)
            assert covers(matches, Span(0, len(text))), f"run {run} of {len(texts)} was lost"

    @holds("What is discarded is reclaimed: storing and discarding without end holds no")
    def test_memory_is_reclaimed_while_the_oldest_goes(self, checked: MatcherWithOracle, writer: Writer) -> None:
        matcher, window = checked.matcher, max(10, self.entries // 20)
        whole = Span(0, writer.length)
        for run in range(window):
            matcher.add(run, writer.text(), whole)
        full = matcher.nbytes
        assert full >= 4 * len(matcher), "the tokens are part of it"
        for run in range(window, 12 * window):
            matcher.discard(run - window, whole)
            matcher.add(run, writer.text(), whole)
        assert len(matcher) == window * writer.length
        assert matcher.nbytes <= SLACK * full


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
