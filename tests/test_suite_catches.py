"""Matchers with one fault each, and the test of the suite that must see it."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from blendhub import Match, Span
from blendhub.contracts.matcher import Reach
from blendhub.core.errors import InvalidInput
from blendhub.testing import MatcherSuite, ReferenceMatcher
from blendhub.testing.reference import ReferenceRun
from tests.suite_runs import proofs

pytestmark = pytest.mark.slow


class Sound(ReferenceMatcher):
    reach: Reach = "anywhere"

    def __init__(self) -> None:
        super().__init__(self.reach, 16)


def faulty(**changed: Any) -> type[Sound]:
    return type("Faulty", (Sound,), changed)


def finding(change: Callable[[Sound, Any, list[Match]], list[Match]], **changed: Any) -> type[Sound]:
    """``change`` makes its answers of the right ones."""
    return faulty(match=lambda self, tokens: change(self, tokens, Sound.match(self, tokens)), **changed)


def all_exact(exact: bool) -> Callable[[Sound, Any, list[Match]], list[Match]]:
    return lambda self, tokens, found: [Match(m.span, m.run, m.source_start, exact) for m in found]


def exact_behind_any_prefix(self: Sound, tokens: Any, found: list[Match]) -> list[Match]:
    def exact(match: Match) -> bool:
        stays = match.source_start == match.span.start
        return stays and bool(self.runs[match.run].exact[match.span.start : match.span.end].all())

    return [Match(match.span, match.run, match.source_start, exact(match)) for match in found]


def trusts_its_hash(self: Sound, tokens: Any, found: list[Match]) -> list[Match]:
    """A polynomial hash modulo 2**64 decides whether two texts of one length are equal."""

    def polynomial(tokens: Any) -> int:
        value = 0
        for token in tokens.tolist():
            value = (value * 0x9E3779B97F4A7C15 + token) % 2**64
        return value

    for name, run in self.runs.items():
        if len(run.tokens) == len(tokens) and polynomial(run.tokens) == polynomial(tokens):
            return [Match(Span(0, len(tokens)), name, 0, False)]
    return found


def compares_only_the_newest(self: Sound, tokens: Any, found: list[Match]) -> list[Match]:
    """Sixteen of the runs that have any four tokens of the prompt."""
    parts = ReferenceMatcher(self.reach, 4)
    parts.runs = self.runs
    newest = sorted({match.run for match in parts.candidates(tokens)})[-16:]
    return [match for match in found if match.run in newest]


def stores_in_two_steps(self: Sound, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
    middle = (span.start + span.end) // 2
    for part in (Span(span.start, middle), Span(middle, span.end)):
        if len(part):
            Sound.add(self, run, tokens, part, exact)
            time.sleep(0.001)


def forgets_to_forget(self: Sound, run: int, span: Span) -> None:
    kept = self.runs[run]
    shadow = ReferenceRun(kept.tokens, 0)
    shadow.grow(kept.tokens, Span(0, kept.end), exact=False)
    Sound.discard(self, run, span)
    self.runs[run] = shadow


def changes_before_it_checks(self: Sound, run: int, span: Span) -> None:
    kept = self.runs.get(run)
    if kept is not None and not kept.holds(span):
        kept.stored[span.start : span.end] = False
        raise InvalidInput("this span is not stored, but what there was of it is gone now")
    Sound.discard(self, run, span)


def takes_an_id_once(self: Sound, run: int, tokens: Any, span: Span, exact: bool = True) -> None:
    used = self.__dict__.setdefault("used", set())
    if run in used - self.runs.keys():
        raise InvalidInput("this id belongs to a run that is gone")
    used.add(run)
    Sound.add(self, run, tokens, span, exact)


class Leaks(Sound):
    leaked = 0

    def discard(self, run: int, span: Span) -> None:
        super().discard(run, span)
        self.leaked += 4 * len(span)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.leaked


FAULTS: dict[str, list[Any]] = {
    "test_newer_runs_that_share_its_parts_hide_no_text": [finding(compares_only_the_newest)],
    "test_texts_crafted_to_collide_are_told_apart": [finding(trusts_its_hash)],
    "test_an_exact_run_is_named_before_others": [
        faulty(add=lambda self, run, tokens, span, exact=True: Sound.add(self, run, tokens, span)),
    ],
    "test_an_id_can_be_used_again": [faulty(add=takes_an_id_once)],
    "test_memory_is_reclaimed_while_the_oldest_goes": [Leaks],
    "test_refuses_to_discard_what_is_not_stored": [faulty(discard=changes_before_it_checks)],
    "test_one_thread_adds_while_another_matches": [faulty(add=stores_in_two_steps)],
    "test_processes_with_other_hash_seeds_agree": [
        finding(lambda self, tokens, found: [match for match in found if hash(str(match)) % 2]),
    ],
    "test_any_history_of_calls": [
        finding(all_exact(True)),
        finding(exact_behind_any_prefix),
        finding(lambda self, tokens, found: found[:1]),
        faulty(discard=forgets_to_forget),
        faulty(__len__=lambda self: max(0, Sound.__len__(self) - 1)),
    ],
}


class TestSound(MatcherSuite):
    """Without a fault there is nothing to catch."""

    entries = 40
    create: Any = Sound


globals().update(proofs(TestSound, FAULTS))
