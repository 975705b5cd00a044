"""What a matcher keeps: how runs grow, how they go, and what is left of the memory they took."""

from itertools import pairwise

import numpy as np

from blendhub.plan import Span
from blendhub.testing.checks import Twins, check_matches, covers, touches
from blendhub.testing.matchers.base import MatcherTests, Writer
from blendhub.testing.reference import ReferenceMatcher

SLACK = 1.5
"""How far memory may vary between equal amounts stored: tables grow in steps. A leak shows as a multiple."""


class StoringTests(MatcherTests):
    """Runs grow at their end, shrink anywhere, and leave nothing behind."""

    def test_length_counts_the_stored_tokens(self, twins: Twins, writer: Writer) -> None:
        assert len(twins.matcher) == 0
        text = writer.text()
        twins.add(1, text)
        twins.add(2, text)
        assert len(twins.matcher) == 2 * len(text)
        twins.discard(1, Span(3, 10))
        assert len(twins.matcher) == 2 * len(text) - 7

    def test_nbytes_includes_the_tokens(self, twins: Twins, writer: Writer) -> None:
        for run in range(20):
            twins.add(run, writer.text())
        assert twins.matcher.nbytes >= 4 * len(twins.matcher)

    def test_only_the_span_is_stored(self, twins: Twins, writer: Writer) -> None:
        tokens, spans = writer.joined(writer.text(), writer.text(), writer.text())
        twins.add(1, tokens, spans[1])
        assert len(twins.matcher) == len(spans[1])
        found = twins.match(tokens)
        assert not touches(found, spans[0]) and not touches(found, spans[2])

    def test_a_run_grows(self, twins: Twins, writer: Writer) -> None:
        text = writer.text(3 * writer.length)
        ends = [1, writer.length // 2, writer.length, writer.length + 1, len(text)]
        for start, end in pairwise([0, *ends]):
            twins.add(1, text[:end], Span(start, end))
            twins.match(text)
        assert covers(twins.match(text), Span(0, len(text)))

    def test_a_run_may_go_on_differently_than_its_tokens_did(self, twins: Twins, writer: Writer) -> None:
        """The tokens after the span were never stored; the run's growth brings others in their place."""
        head, one, other = writer.text(), writer.text(), writer.text()
        twins.add(1, np.concatenate([head, one]), Span(0, len(head)))
        twins.add(1, np.concatenate([head, other]), Span(len(head), len(head) + len(other)))
        assert covers(twins.match(np.concatenate([head, other])), Span(0, len(head) + len(other)))
        assert not touches(twins.match(np.concatenate([head, one])), Span(len(head), len(head) + len(one)))

    def test_a_run_grows_after_its_end_was_discarded(self, twins: Twins, writer: Writer) -> None:
        text = writer.text(2 * writer.length)
        half = writer.length
        twins.add(1, text, Span(0, half))
        twins.discard(1, Span(half - 5, half))
        twins.add(1, text, Span(half, len(text)))
        twins.match(text)

    def test_the_matcher_keeps_its_own_copy(self, twins: Twins, writer: Writer) -> None:
        text = writer.text()
        buffer = text.copy()
        twins.add(1, buffer)
        buffer[:] = writer.text()
        assert covers(twins.match(text), Span(0, len(text)))
        assert twins.match(buffer) == []

    def test_what_is_discarded_is_not_matched(self, twins: Twins, writer: Writer) -> None:
        text = writer.text()
        twins.add(1, text)
        twins.discard(1, Span(0, len(text)))
        assert len(twins.matcher) == 0
        assert twins.match(text) == []

    def test_both_sides_of_a_discarded_span_stay(self, twins: Twins, writer: Writer) -> None:
        tokens, spans = writer.joined(writer.text(), writer.text(), writer.text())
        twins.add(1, tokens)
        twins.discard(1, spans[1])
        found = twins.match(tokens)
        assert covers(found, spans[0]) and not touches(found, spans[1])
        if twins.matcher.reach != "prefix":
            assert covers(found, spans[2])

    def test_any_part_can_be_discarded(self, twins: Twins, writer: Writer) -> None:
        length = 3 * writer.length
        for run, span in enumerate((Span(0, 1), Span(length - 1, length), Span(5, 6), Span(1, length - 1))):
            text = writer.text(length)
            twins.add(run, text)
            twins.discard(run, span)
            assert not touches(twins.match(text), span)

    def test_two_runs_of_one_text_and_one_is_discarded(self, twins: Twins, writer: Writer) -> None:
        text = writer.text()
        for kept, gone in ((1, 2), (4, 3)):
            for run in sorted((kept, gone)):
                twins.add(run, text)
            twins.discard(gone, Span(0, len(text)))
            found = twins.match(text)
            assert covers(found, Span(0, len(text))) and {match.run for match in found} == {kept}
            twins.discard(kept, Span(0, len(text)))

    def test_an_id_can_be_used_again(self, twins: Twins, writer: Writer) -> None:
        first, second = writer.text(), writer.text(2 * writer.length)
        twins.add(2**63 - 1, first)
        twins.discard(2**63 - 1, Span(0, len(first)))
        twins.add(2**63 - 1, second, Span(9, len(second)))
        assert twins.match(first) == []
        twins.match(second)

    def test_many_runs_are_all_found(self, twins: Twins, writer: Writer) -> None:
        """Enough to make every table grow several times; each answer is judged by its own run."""
        matcher = twins.matcher
        texts = [writer.text() for _ in range(self.entries)]
        for run, text in enumerate(texts):
            matcher.add(run, text, Span(0, len(text)))
        assert len(matcher) == sum(map(len, texts))
        for run, text in enumerate(texts):
            alone = ReferenceMatcher()
            alone.add(run, text, Span(0, len(text)))
            found = matcher.match(text)
            check_matches(text, found, alone)
            assert covers(found, Span(0, len(text))), f"run {run} of {len(texts)} was lost"

    def test_memory_is_reclaimed(self, twins: Twins, writer: Writer) -> None:
        matcher, runs = twins.matcher, max(10, self.entries // 20)
        whole = Span(0, writer.length)
        full: list[int] = []
        for _ in range(12):
            for run in range(runs):
                matcher.add(run, writer.text(), whole)
            full.append(matcher.nbytes)
            for run in range(runs):
                matcher.discard(run, whole)
            assert len(matcher) == 0
        assert max(full) <= SLACK * full[0], f"bytes held at each peak: {full}"

    def test_memory_is_reclaimed_while_the_oldest_goes(self, twins: Twins, writer: Writer) -> None:
        matcher, window = twins.matcher, max(10, self.entries // 20)
        whole = Span(0, writer.length)
        for run in range(window):
            matcher.add(run, writer.text(), whole)
        full = matcher.nbytes
        for run in range(window, 12 * window):
            matcher.discard(run - window, whole)
            matcher.add(run, writer.text(), whole)
        assert len(matcher) == window * writer.length
        assert matcher.nbytes <= SLACK * full
