"""Matchers with one fault each, and the test of the suite that must see it."""

import time
from typing import Any

import numpy as np
import pytest

from blendhub import Match, Span
from blendhub.contracts import Matcher
from blendhub.contracts.matcher import Reach
from blendhub.core.errors import InvalidInput
from blendhub.testing import MatcherSuite, ReferenceMatcher
from blendhub.testing.reference import ReferenceRun
from tests.suite_runs import all_tests, proofs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_shrinking")]


class Sound(ReferenceMatcher):
    reach: Reach = "anywhere"

    def __init__(self) -> None:
        super().__init__(self.reach, 16)


class FindsOnlyTheFirst(Sound):
    def match(self, tokens: Any) -> list[Match]:
        return super().match(tokens)[:1]


class TrustsItsHash(Sound):
    """A polynomial hash modulo 2**64 decides whether two texts of one length are equal."""

    def match(self, tokens: Any) -> list[Match]:
        for name, run in self.runs.items():
            if len(run.tokens) == len(tokens) and _polynomial(run.tokens) == _polynomial(tokens):
                return [Match(Span(0, len(tokens)), name, 0, False)]
        return super().match(tokens)


def _polynomial(tokens: Any) -> int:
    value = 0
    for token in tokens.tolist():
        value = (value * 0x9E3779B97F4A7C15 + token) % 2**64
    return value


class ForgetsToForget(Sound):
    def discard(self, run: int, span: Span) -> None:
        kept = self.runs[run]
        shadow = ReferenceRun(kept.tokens, 0)
        shadow.grow(kept.tokens, Span(0, kept.end), exact=False)
        super().discard(run, span)
        self.runs[run] = shadow


class DropsTheRestOfTheRun(Sound):
    def discard(self, run: int, span: Span) -> None:
        kept = self.runs.get(run)
        super().discard(run, span)
        if kept is not None and run in self.runs:
            kept.stored[span.start :] = False


class CallsEverythingExact(Sound):
    def match(self, tokens: Any) -> list[Match]:
        return [Match(m.span, m.run, m.source_start, True) for m in super().match(tokens)]


class TakesAllForExact(Sound):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        super().add(run, tokens, span, True)


class AnswersInNumpy(Sound):
    def match(self, tokens: Any) -> list[Match]:
        int64: Any = np.int64
        return [Match(m.span, int64(m.run), m.source_start, m.exact) for m in super().match(tokens)]


class KeepsTheCallersArray(Sound):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        super().add(run, tokens, span, exact)
        self.runs[run].tokens = tokens


class ChangesBeforeItChecks(Sound):
    def discard(self, run: int, span: Span) -> None:
        kept = self.runs.get(run)
        if kept is not None and not kept.holds(span):
            kept.stored[span.start : span.end] = False
            raise InvalidInput("this span is not stored, but what there was of it is gone now")
        super().discard(run, span)


class Leaks(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.leaked = 0

    def discard(self, run: int, span: Span) -> None:
        super().discard(run, span)
        self.leaked += 4 * len(span)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.leaked


class StoresInTwoSteps(Sound):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        if len(span) < 2:
            return super().add(run, tokens, span, exact)
        middle = (span.start + span.end) // 2
        super().add(run, tokens, Span(span.start, middle), exact)
        time.sleep(0.001)
        super().add(run, tokens, Span(middle, span.end), exact)


class DependsOnTheHashSeed(Sound):
    def match(self, tokens: Any) -> list[Match]:
        return [match for match in super().match(tokens) if hash(str(match)) % 2]


class ForgetsWhenFull(Sound):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        super().add(run, tokens, span, exact)
        if len(self.runs) > 20:
            self.runs[run - 20].tokens[:] = 0


class CountsOneShort(Sound):
    def __len__(self) -> int:
        return max(0, super().__len__() - 1)


class StoresAllTokens(Sound):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        super().add(run, tokens, span, exact)
        if len(tokens) > span.end:
            super().add(run, tokens, Span(span.end, len(tokens)), exact)


class GuaranteesNothing(Sound):
    guaranteed_tokens = 0


class FindsWhatIsNotStored(Sound):
    def match(self, tokens: Any) -> list[Match]:
        return super().match(tokens) or [Match(Span(0, 1), run, 0, False) for run in list(self.runs)[:1]]


class CallsNothingExact(Sound):
    reach: Reach = "prefix"

    def match(self, tokens: Any) -> list[Match]:
        return [Match(m.span, m.run, m.source_start, False) for m in super().match(tokens)]


class RemembersTheOldRun(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, int] = {}

    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        if self.ends.get(run, span.start) != span.start:
            raise InvalidInput(f"run {run} was known before, and cannot begin at {span.start}")
        super().add(run, tokens, span, exact)
        self.ends[run] = span.end


class GrowsAnywhere(Sound):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        if run in self.runs:
            self.runs[run].end = span.start
        super().add(run, tokens, span, exact)


FAULTS = [
    (GuaranteesNothing, "test_promises_a_known_reach"),
    (FindsWhatIsNotStored, "test_what_was_never_stored_is_not_found"),
    (AnswersInNumpy, "test_a_stored_text_is_found_whole"),
    (FindsOnlyTheFirst, "test_texts_in_another_order_and_one_of_them_twice"),
    (TrustsItsHash, "test_texts_crafted_to_collide_are_told_apart"),
    (CallsNothingExact, "test_a_prefix_stored_as_exact_is_exact"),
    (CallsEverythingExact, "test_neither_another_prefix_nor_what_was_blended_is_exact"),
    (TakesAllForExact, "test_an_exact_run_is_named_before_others"),
    (StoresAllTokens, "test_a_run_may_go_on_differently_than_its_tokens_did"),
    (KeepsTheCallersArray, "test_the_matcher_keeps_its_own_copy"),
    (DropsTheRestOfTheRun, "test_both_sides_of_a_discarded_span_stay"),
    (RemembersTheOldRun, "test_an_id_can_be_used_again"),
    (ForgetsWhenFull, "test_many_runs_are_all_found"),
    (Leaks, "test_memory_is_reclaimed_while_the_oldest_goes"),
    (GrowsAnywhere, "test_refuses_growth_anywhere_but_at_the_end"),
    (ChangesBeforeItChecks, "test_refuses_to_discard_what_is_not_stored"),
    (StoresInTwoSteps, "test_one_thread_adds_while_another_matches"),
    (DependsOnTheHashSeed, "test_processes_with_other_hash_seeds_agree"),
    *((faulty, "test_any_history_of_calls") for faulty in (ForgetsToForget, CountsOneShort, FindsOnlyTheFirst)),
]


class Suite(MatcherSuite):
    entries = 40
    plugin: type[Matcher] = Sound

    def create(self) -> Matcher:
        return self.plugin()


class TestSound(Suite):
    """Without a fault there is nothing to catch."""


class TestSoundPrefix(Suite):
    """The tests that take long do not depend on the reach."""

    plugin = type("SoundPrefix", (Sound,), {"reach": "prefix"})
    test_any_history_of_calls = test_processes_with_other_hash_seeds_agree = None


class TestSoundSegments(TestSoundPrefix):
    plugin = type("SoundSegments", (Sound,), {"reach": "segments"})


globals().update(proofs(Suite, FAULTS))


def test_a_faulty_matcher_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(MatcherSuite)
