"""Any history of calls, against the reference: what hypothesis thinks up, and shrinks when it fails."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from blendhub.contracts.matcher import Matcher
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.testing.checks import MatcherWithOracle
from blendhub.testing.histories import run_histories
from blendhub.testing.matchers.base import MatcherTests
from blendhub.testing.sentences import holds

RUNS = range(5)


def _tapes(alphabet: np.ndarray, length: int) -> list[Tokens]:
    """Sequences that repeat themselves in different ways; texts are cut from them, so that they overlap."""
    random = np.random.default_rng(11)
    patterns = [
        np.zeros(length, int),
        np.arange(length) % 2,
        np.array([i.bit_count() % 2 for i in range(length)]),
        random.integers(0, len(alphabet), length),
        (np.arange(length) // 17) % len(alphabet),
    ]
    wide = random.integers(100, 2**32, length, dtype=np.uint32)
    return [*(alphabet[pattern] for pattern in patterns), wide]


class MatcherHistory(RuleBasedStateMachine):
    """The calls of a matcher in any order. Few tokens and short tapes make repeats and overlaps common."""

    def __init__(self, create: Callable[[], Matcher], separator: tuple[int, ...]) -> None:
        super().__init__()
        self.checked = MatcherWithOracle(create(), separator)
        self.unit = max(8, self.checked.matcher.guaranteed_tokens)
        self.separator = np.array(separator, np.uint32)
        # Separators must occur in the texts, or there would be no segments to find.
        alphabet = np.array([*separator, 1, 2**31, 2**32 - 1], np.uint32)
        self.tapes = _tapes(alphabet, 3 * self.unit)

    def slices(self, source: Tokens, data: st.DataObject) -> Tokens:
        """Lengths about the guarantee are what matters: just too short, just enough, and enough at any offset."""
        unit = self.unit
        length = data.draw(st.sampled_from([3 * unit, unit, unit + 1, unit - 1, 3, 1]), label="tokens")
        start = data.draw(st.integers(0, max(0, len(source) - length)), label="from")
        return source[start : start + length]

    def text(self, data: st.DataObject, pieces: int = 3) -> Tokens:
        """A few slices of what stored runs hold and of tapes."""
        sources = [*self.stored_texts(), *self.tapes]
        chosen = data.draw(st.lists(st.integers(0, len(sources) - 1), min_size=1, max_size=pieces), label="sources")
        between = data.draw(st.sampled_from([self.separator, self.separator[:0]]), label="between")
        return np.concatenate([part for i in chosen for part in (between, self.slices(sources[i], data))])

    def stored_texts(self) -> list[Tokens]:
        """The runs, or each long segment of them: a cut through a segment would leave nothing to find."""
        reference = self.checked.reference
        runs = [run.tokens for run in reference.runs.values()]
        if reference.reach != "segments":
            return runs
        segments = [run[span.start : span.end] for run in runs for span in reference.segments(run)]
        return [segment for segment in segments if len(segment) >= reference.guaranteed_tokens]

    @initialize()
    def store_two_runs(self) -> None:
        """Matches of an empty matcher teach nothing."""
        for run, order in enumerate(((-1, 2, 0), (1, 3, 4, -1))):
            parts = [part for i in order for part in (self.tapes[i], self.separator)]
            self.checked.add(run, np.concatenate(parts))

    @rule(data=st.data(), run=st.sampled_from(RUNS), exact=st.booleans())
    def add(self, data: st.DataObject, run: int, exact: bool) -> None:
        """A new run, or the growth of a known one; the sequence may go on after the span."""
        earlier = self.checked.reference.runs.get(run)
        new = self.text(data)
        cut = data.draw(st.integers(1, len(new)), label="stored tokens")
        if earlier is None:
            first = data.draw(st.integers(0, cut - 1), label="first stored position")
            self.checked.add(run, new, Span(first, cut), exact)
        else:
            tokens = np.concatenate([earlier.tokens[: earlier.end], new])
            self.checked.add(run, tokens, Span(earlier.end, earlier.end + cut), exact)

    @precondition(lambda self: self.checked.reference.runs)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """Part of a stretch that is stored, or all of it."""
        name, run = data.draw(st.sampled_from(sorted(self.checked.reference.runs.items())), label="run")
        start = data.draw(st.sampled_from(np.flatnonzero(run.stored).tolist()), label="start")
        missing = np.flatnonzero(~run.stored[start:])
        end = start + int(missing[0]) if len(missing) else len(run.stored)
        self.checked.discard(name, Span(start, data.draw(st.integers(start + 1, end), label="end")))

    @precondition(lambda self: len(self.checked.reference.runs) == len(RUNS))
    @rule()
    def discard_everything(self) -> None:
        """Token by token, once all ids are taken; then nothing is found."""
        runs = dict(self.checked.reference.runs)
        for name, run in sorted(runs.items()):
            for position in np.flatnonzero(run.stored).tolist():
                self.checked.discard(name, Span(position, position + 1))
        assert len(self.checked.matcher) == 0
        for run in runs.values():
            assert self.checked.matcher.match(run.tokens) == []

    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        self.checked.match(self.text(data, pieces=5))


@holds("They are disjoint, ascending, not empty and name only tokens that are stored")
class MatcherHistoryTests(MatcherTests):
    """The matcher and the reference agree after any history of calls."""

    @pytest.mark.slow
    def test_any_history_of_calls(self) -> None:
        run_histories(partial(MatcherHistory, self.create, self.separator), examples=60, steps=25)
