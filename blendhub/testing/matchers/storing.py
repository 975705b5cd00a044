"""What a matcher keeps: how runs grow, how they go, and what is left of the memory they took."""

import numpy as np

from blendhub.core.spans import Span
from blendhub.testing.checks import MatcherWithOracle, check_matches, covers, touches
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.reference import ReferenceMatcher
from blendhub.testing.sentences import holds

SLACK = 1.5
"""How far memory may vary between equal amounts stored: tables grow in steps. A leak shows as a multiple."""


@holds("They are disjoint, ascending, not empty and name only tokens that are stored")
class StoringTests(MatcherTests):
    """Runs grow at their end, shrink anywhere, and leave nothing behind."""

    @holds("A run grows at its end only: a later span starts where the last span ended,")
    def test_a_run_may_go_on_differently_than_its_tokens_did(self, checked: MatcherWithOracle, writer: Writer) -> None:
        """The tokens after the span were never stored; the run's growth brings others in their place."""
        head, first, second = writer.text(), writer.text(), writer.text()
        checked.add(1, np.concatenate([head, first]), Span(0, len(head)))
        checked.add(1, np.concatenate([head, second]), Span(len(head), len(head) + len(second)))
        assert covers(checked.match(np.concatenate([head, second])), Span(0, len(head) + len(second)))
        assert not touches(checked.match(np.concatenate([head, first])), Span(len(head), len(head) + len(first)))

    @holds("the matcher keeps its own copy of what it needs.")
    def test_the_matcher_keeps_its_own_copy(self, checked: MatcherWithOracle, writer: Writer) -> None:
        text = writer.text()
        buffer = text.copy()
        checked.add(1, buffer)
        buffer[:] = writer.text()
        assert covers(checked.match(text), Span(0, len(text)))
        assert checked.match(buffer) == []

    @holds("What is left of the run on both sides stays matchable.")
    def test_both_sides_of_a_discarded_span_stay(self, checked: MatcherWithOracle, writer: Writer) -> None:
        tokens, spans = writer.joined(writer.text(), writer.text(), writer.text())
        checked.add(1, tokens)
        checked.discard(1, spans[1])
        matches = checked.match(tokens)
        assert covers(matches, spans[0]) and not touches(matches, spans[1])
        assert covers(matches, spans[2]) or checked.matcher.reach == "prefix"

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
