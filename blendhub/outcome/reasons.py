"""Why a stretch of a prompt was computed, and not reused: the words of reports, in terminals and on the hub's page."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from blendhub.core.spans import Span
from blendhub.outcome.fates import Fate, Stretch, stretches_of


class Why(StrEnum):
    """Why stored KV was not used, or that there was none."""

    NOT_STORED = "not_stored"
    ON_THE_WAY = "on_the_way"
    NOT_MOVED = "not_moved"
    BEYOND = "beyond"
    BEHIND_HOLE = "behind_hole"
    TOO_MUCH = "too_much"
    TOO_SLOW = "too_slow"
    TOO_LITTLE = "too_little"
    LAST = "last"
    FAILED = "failed"
    REFUSED = "refused"
    ENDED = "ended"
    NOT_ASKED = "not_asked"

    @property
    def sentence(self) -> str:
        return SENTENCES[self]


SENTENCES = {
    Why.NOT_STORED: "it is not stored, or not any more, or in pieces shorter than a matcher finds (min_match_tokens)",
    Why.ON_THE_WAY: "it is in the store, and was not in memory yet when the lookup had to answer (lookup_timeout_s)",
    Why.NOT_MOVED: "it is stored elsewhere or behind other text, and this request moves no text",
    Why.BEYOND: "it is stored at positions beyond max_model_len, from which its keys cannot be turned",
    Why.BEHIND_HOLE: "it is stored, but stands behind text that is not, and this request computes no holes",
    Why.TOO_MUCH: "it is stored, but reuse would recompute more than policy.max_recompute_share",
    Why.TOO_SLOW: "it is stored, but vLLM computes it in fewer steps than reuse recomputes (blend_tokens_per_step)",
    Why.TOO_LITTLE: "it is stored, but all that could be reused is less than policy.min_reused_tokens",
    Why.LAST: "it is stored, but vLLM always computes the last token",
    Why.FAILED: "it is stored, but its load failed",
    Why.REFUSED: "it is stored, but the whole request reuses nothing",
    Why.ENDED: "it is stored, but the request ended before it was loaded",
    Why.NOT_ASKED: "the hub was not asked, or its answer was not awaited or came too late",
}


WHYS = list(Why)
NO_REASON = -1


class NotReused(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a prompt that was computed."""

    span: Span
    why: Why


def not_reused(plan: Sequence[Stretch], whys: Mapping[Why, Sequence[Span]]) -> list[NotReused]:
    """The stretches of a prompt that were computed, with the reasons. Of overlapping reasons, the later one counts."""
    reasons = np.full(plan[-1].span.end if plan else 0, NO_REASON)
    for why, spans in whys.items():
        number = WHYS.index(why)
        for span in spans:
            reasons[span.start : span.end] = number
    for one in plan:
        if one.fate not in (Fate.HOLE, Fate.COMPUTED):
            reasons[one.span.start : one.span.end] = NO_REASON
    return [NotReused(span, WHYS[number]) for span, number in stretches_of(reasons) if number != NO_REASON]


def longest(computed: Sequence[NotReused], most: int) -> list[NotReused]:
    """The longest stretches, at most so many, in the order of the prompt."""
    return sorted(sorted(computed, key=lambda one: -len(one.span))[:most], key=lambda one: one.span)
