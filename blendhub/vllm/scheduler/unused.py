"""Finds, when a request has ended, why KV that was found was not reused, stretch by stretch."""

from collections.abc import Iterator
from typing import NamedTuple, Self

from blendhub.client.wire import Found
from blendhub.core.spans import Match, Span
from blendhub.outcome.reasons import Why
from blendhub.vllm.decision import Allowed, Decision, Refusal
from blendhub.vllm.scheduler.decide import movable
from blendhub.vllm.scheduler.request_state import RequestState

OF_CODES = {
    "too_much": Why.TOO_MUCH,
    "too_slow": Why.TOO_SLOW,
    "too_little": Why.TOO_LITTLE,
    "on_the_way": Why.TOO_LITTLE,
}
"""The reasons for refusals, by code: ``on_the_way`` means too little without KV that is still in the store."""


class Attempt(NamedTuple):
    """The rest of a request's attempt to reuse KV."""

    found: Found | None
    allowed: Allowed | None
    decision: Decision | None
    refusal: Refusal | None
    is_loaded: bool
    has_failed: bool

    @classmethod
    def of(cls, state: RequestState) -> Self:
        has_failed = bool(state.result and state.result.error)
        return cls(state.found, state.allowed, state.decision, state.refusal, state.loaded is not None, has_failed)

    @property
    def outcome(self) -> Why:
        """Why available stored KV is not used."""
        if self.has_failed:
            return Why.FAILED
        if self.is_loaded and self.decision:
            return OF_CODES[self.decision.left_out.code] if self.decision.left_out else Why.BEHIND_HOLE
        if self.refusal:
            return OF_CODES.get(self.refusal.code, Why.REFUSED)
        return Why.ENDED


def why_unused(attempt: Attempt, n_tokens: int) -> dict[Why, list[Span]]:
    """Why tokens of the prompt are not reused, if they are not; of reasons that overlap, the later one counts."""
    whole = Span(0, n_tokens)
    if attempt.found is None:
        return {Why.NOT_ASKED: [whole]}
    whys = {Why.NOT_STORED: [whole], Why.ON_THE_WAY: list(attempt.found.on_the_way)}
    for why, span in _of_matches(attempt.found.matches, attempt.allowed, attempt):
        whys.setdefault(why, []).append(span)
    matches = attempt.found.matches
    if matches and n_tokens and matches[-1].span.end >= n_tokens:
        whys[Why.LAST] = [Span(n_tokens - 1, n_tokens)]
    return whys


def _of_matches(matches: tuple[Match, ...], allowed: Allowed | None, attempt: Attempt) -> Iterator[tuple[Why, Span]]:
    outcome = attempt.outcome
    if allowed is None:
        yield from ((outcome, match.span) for match in matches)
        return
    reached, is_broken = allowed.local, False
    for match in matches:
        if not (match.exact or allowed.blend):
            yield Why.NOT_MOVED, match.span
            continue
        usable = movable(match, allowed.n_positions).span
        if usable.end < match.span.end:
            yield Why.BEYOND, Span(usable.end, match.span.end)
        is_broken = is_broken or usable.start > reached
        reached = max(reached, usable.end)
        if is_broken and not allowed.holes:
            yield Why.BEHIND_HOLE, usable
        elif not (match.moved or attempt.is_loaded) and outcome in (Why.TOO_MUCH, Why.TOO_SLOW):
            # Without moved text nothing is too much; what is left was too little.
            yield Why.TOO_LITTLE, usable
        else:
            yield outcome, usable
