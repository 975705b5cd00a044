"""A suite that nothing fails is worth nothing: matchers with one fault each, and the test that must see it."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendhub import Match, Span
from blendhub.contracts import Matcher
from blendhub.core.errors import InvalidInput
from blendhub.core.tokens import as_tokens
from blendhub.testing import MatcherSuite, ReferenceMatcher
from blendhub.testing.reference import ReferenceRun
from tests.suite_runs import all_tests, passes

pytestmark = pytest.mark.slow


class FindsOnlyTheFirst(ReferenceMatcher):
    def match(self, tokens: Any) -> list[Match]:
        return super().match(tokens)[:1]


class TrustsItsHash(ReferenceMatcher):
    """A polynomial hash modulo 2**64 decides whether two texts of one length are equal."""

    def match(self, tokens: Any) -> list[Match]:
        prompt = as_tokens(tokens)
        for name, run in self.runs.items():
            if len(run.tokens) == len(prompt) and _polynomial(run.tokens) == _polynomial(prompt):
                return [Match(Span(0, len(prompt)), name, 0, False)]
        return super().match(tokens)


def _polynomial(tokens: Any) -> int:
    value = 0
    for token in tokens.tolist():
        value = (value * 0x9E3779B97F4A7C15 + token) % 2**64
    return value


class ForgetsToForget(ReferenceMatcher):
    def discard(self, run: int, span: Span) -> None:
        kept = self.runs[run]
        shadow = ReferenceRun(kept.tokens, 0)
        shadow.grow(kept.tokens, Span(0, kept.end), exact=False)
        super().discard(run, span)
        self.runs[run] = shadow


class DropsTheRestOfTheRun(ReferenceMatcher):
    def discard(self, run: int, span: Span) -> None:
        kept = self.runs.get(run)
        super().discard(run, span)
        if kept is not None and run in self.runs:
            kept.stored[span.start :] = False


class CallsEverythingExact(ReferenceMatcher):
    def match(self, tokens: Any) -> list[Match]:
        return [Match(m.span, m.run, m.source_start, True) for m in super().match(tokens)]


class TakesAllForExact(ReferenceMatcher):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        super().add(run, tokens, span, True)


class AnswersInNumpy(ReferenceMatcher):
    def match(self, tokens: Any) -> list[Match]:
        int64: Any = np.int64
        return [Match(m.span, int64(m.run), m.source_start, m.exact) for m in super().match(tokens)]


class KeepsTheCallersArray(ReferenceMatcher):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        super().add(run, tokens, span, exact)
        self.runs[run].tokens = tokens


class ChangesBeforeItChecks(ReferenceMatcher):
    def discard(self, run: int, span: Span) -> None:
        known = self.runs.get(run)
        if known is not None and not known.holds(span):
            known.stored[span.start : span.end] = False
            raise InvalidInput("this span is not stored, but what there was of it is gone now")
        super().discard(run, span)


class Leaks(ReferenceMatcher):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.leaked = 0

    def discard(self, run: int, span: Span) -> None:
        super().discard(run, span)
        self.leaked += 4 * len(span)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.leaked


class StoresInTwoSteps(ReferenceMatcher):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        if len(span) < 2:
            return super().add(run, tokens, span, exact)
        middle = (span.start + span.end) // 2
        super().add(run, tokens, Span(span.start, middle), exact)
        time.sleep(0.001)
        super().add(run, tokens, Span(middle, span.end), exact)


class DependsOnTheHashSeed(ReferenceMatcher):
    def match(self, tokens: Any) -> list[Match]:
        found = super().match(tokens)
        return [m for m in found if hash(str(m)) % 2]


class ForgetsWhenFull(ReferenceMatcher):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        super().add(run, tokens, span, exact)
        if len(self.runs) > 20:
            self.runs[run - 20].tokens[:] = 0


class CountsOneShort(ReferenceMatcher):
    def __len__(self) -> int:
        return max(0, super().__len__() - 1)


class StoresAllTokens(ReferenceMatcher):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        super().add(run, tokens, span, exact)
        if len(tokens) > span.end:
            super().add(run, tokens, Span(span.end, len(tokens)), exact)


class GuaranteesNothing(ReferenceMatcher):
    guaranteed_tokens = 0


class FindsWhatIsNotStored(ReferenceMatcher):
    def match(self, tokens: Any) -> list[Match]:
        found = super().match(tokens)
        return found or [Match(Span(0, 1), run, 0, False) for run in list(self.runs)[:1]]


class TrustsTheBeginning(ReferenceMatcher):
    """Eight tokens that agree stand for a whole run."""

    def match(self, tokens: Any) -> list[Match]:
        for name, run in self.runs.items():
            if len(run.tokens) == len(tokens) and np.array_equal(run.tokens[:8], tokens[:8]):
                return [Match(Span(0, len(tokens)), name, 0, False)]
        return super().match(tokens)


class CallsNothingExact(ReferenceMatcher):
    def match(self, tokens: Any) -> list[Match]:
        return [Match(m.span, m.run, m.source_start, False) for m in super().match(tokens)]


class ForgetsItsTokensInTheSum(ReferenceMatcher):
    @property
    def nbytes(self) -> int:
        return len(self.runs)


class RemembersTheOldRun(ReferenceMatcher):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ends: dict[int, int] = {}

    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        if self.ends.get(run, span.start) != span.start:
            raise InvalidInput(f"run {run} was known before, and cannot begin at {span.start}")
        super().add(run, tokens, span, exact)
        self.ends[run] = span.end


class GrowsAnywhere(ReferenceMatcher):
    def add(self, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
        if run in self.runs:
            self.runs[run].end = span.start
        super().add(run, tokens, span, exact)


FAULTS = [
    (GuaranteesNothing, "anywhere", "test_promises_a_known_reach"),
    (FindsWhatIsNotStored, "anywhere", "test_a_text_that_was_never_stored_is_not_found"),
    (FindsWhatIsNotStored, "prefix", "test_an_empty_prompt_has_no_matches"),
    (TrustsTheBeginning, "anywhere", "test_one_changed_token_is_never_covered"),
    (CallsNothingExact, "prefix", "test_a_prefix_stored_as_exact_is_exact"),
    (ForgetsItsTokensInTheSum, "anywhere", "test_nbytes_includes_the_tokens"),
    (RemembersTheOldRun, "anywhere", "test_an_id_can_be_used_again"),
    (GrowsAnywhere, "anywhere", "test_refuses_growth_anywhere_but_at_the_end"),
    (FindsOnlyTheFirst, "anywhere", "test_the_same_text_twice_in_one_prompt"),
    (FindsOnlyTheFirst, "segments", "test_texts_in_another_order"),
    (FindsOnlyTheFirst, "anywhere", "test_any_history_of_calls"),
    (TrustsItsHash, "anywhere", "test_thue_morse_texts_do_not_collide"),
    (TrustsItsHash, "prefix", "test_five_tokens_crafted_to_collide"),
    (ForgetsToForget, "prefix", "test_what_is_discarded_is_not_matched"),
    (ForgetsToForget, "segments", "test_any_history_of_calls"),
    (DropsTheRestOfTheRun, "anywhere", "test_both_sides_of_a_discarded_span_stay"),
    (DropsTheRestOfTheRun, "prefix", "test_any_history_of_calls"),
    (CallsEverythingExact, "prefix", "test_what_was_blended_is_not_exact"),
    (CallsEverythingExact, "segments", "test_the_prefix_counts_even_where_it_is_not_stored"),
    (CallsEverythingExact, "anywhere", "test_any_history_of_calls"),
    (TakesAllForExact, "anywhere", "test_an_exact_run_is_named_before_others"),
    (AnswersInNumpy, "prefix", "test_a_stored_text_is_found_whole"),
    (KeepsTheCallersArray, "anywhere", "test_the_matcher_keeps_its_own_copy"),
    (ChangesBeforeItChecks, "anywhere", "test_refuses_to_discard_what_is_not_stored"),
    (Leaks, "anywhere", "test_memory_is_reclaimed_while_the_oldest_goes"),
    (StoresInTwoSteps, "anywhere", "test_one_thread_adds_while_another_matches"),
    (DependsOnTheHashSeed, "anywhere", "test_processes_with_other_hash_seeds_agree"),
    (ForgetsWhenFull, "anywhere", "test_many_runs_are_all_found"),
    (CountsOneShort, "anywhere", "test_length_counts_the_stored_tokens"),
    (CountsOneShort, "anywhere", "test_any_history_of_calls"),
    (StoresAllTokens, "anywhere", "test_only_the_span_is_stored"),
    (StoresAllTokens, "anywhere", "test_a_run_may_go_on_differently_than_its_tokens_did"),
]


def suite_of(fault: str) -> type[MatcherSuite]:
    name, reach = fault.split()

    class Suite(MatcherSuite):
        entries = 40

        def create(self) -> Matcher:
            return globals()[name](reach, 16)

    return Suite


def test_a_faulty_matcher_proves_each_test() -> None:
    assert {test for _, _, test in FAULTS} == all_tests(MatcherSuite)


@pytest.mark.parametrize("reach", ["anywhere", "prefix", "segments"])
def test_without_a_fault_there_is_nothing_to_catch(reach: str, tmp_path: Path) -> None:
    assert passes(__name__, f"ReferenceMatcher {reach}", "", tmp_path)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, reach, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[ReferenceMatcher], reach: str, test: str, tmp_path: Path) -> None:
    assert not passes(__name__, f"{faulty.__name__} {reach}", test, tmp_path), f"{test} lets {faulty.__name__} pass"
