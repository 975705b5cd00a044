"""Why tokens of a prompt were computed, and not reused: the one vocabulary of metrics, reports and the hub's page."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np

from blendhub.core.spans import Span
from blendhub.outcome.fates import Fate, Stretch, stretches_of


class Why(StrEnum):
    """The code of why stored KV was not used, or that there was none: of a whole request, or of a stretch."""

    NOTHING_STORED = "nothing_stored"
    NOTHING_EXACT = "nothing_exact"
    SHALLOW = "shallow"
    NOT_DONATED = "not_donated"
    NO_STATE = "no_state"
    NO_MAP = "no_map"
    ON_THE_WAY = "on_the_way"
    TOO_LITTLE = "too_little"
    TOO_MUCH = "too_much"
    TOO_SLOW = "too_slow"
    NO_SCRATCH = "no_scratch"
    BEYOND = "beyond"
    BEHIND_HOLE = "behind_hole"
    LAST = "last"
    FAILED = "failed"
    ENDED = "ended"
    OFF = "off"
    ROLE = "role"
    REQUEST = "request"
    ADAPTER = "adapter"
    BAD_REQUEST = "bad_request"
    ALL_COMPUTED = "all_computed"
    OTHER_CONNECTOR = "other_connector"
    HUB_FAILED = "hub_failed"
    MODEL = "model"

    @property
    def message(self) -> str:
        return MESSAGES[self]


MESSAGES = {
    Why.NOTHING_STORED: "it is not stored, or not any more, or in pieces shorter than a matcher finds "
    "(min_match_tokens)",
    Why.NOTHING_EXACT: "it is stored elsewhere or behind other text, and this request moves no text",
    Why.SHALLOW: "it is stored only where it was computed with too little text before it (policy.min_donor_context)",
    Why.NOT_DONATED: "it is stored only of requests that may not donate (donors)",
    Why.NO_STATE: "it is stored, and behind it no state of the model's recurrent layers, from which they could go on",
    Why.NO_MAP: "it is stored elsewhere, but not as a segment, as which alone text moves in a model with recurrent "
    "layers",
    Why.ON_THE_WAY: "it is in the store, and did not come into memory in time (lookup_timeout_s)",
    Why.TOO_LITTLE: "it is stored, but too little could be reused (policy.min_reused_tokens)",
    Why.TOO_MUCH: "it is stored, but reuse would recompute more than 80% of the tokens",
    Why.TOO_SLOW: "it is stored, but by times measured at the start computing it is faster",
    Why.NO_SCRATCH: "it is stored, but vLLM has too few free blocks to blend with attention windows",
    Why.BEYOND: "it is stored at positions beyond max_model_len, from which keys cannot be turned",
    Why.BEHIND_HOLE: "it is stored, but behind text that is not, and this request computes no holes",
    Why.LAST: "it is stored, but vLLM always computes the last token, and with EAGLE or MTP the last stored one",
    Why.FAILED: "it is stored, but its load failed",
    Why.ENDED: "the request ended before it was looked up or loaded",
    Why.OFF: "mode is off",
    Why.ROLE: "this engine only stores (kv_role)",
    Why.REQUEST: "requests of this kind reuse nothing",
    Why.ADAPTER: "the weights of the request's LoRA adapter were not known",
    Why.BAD_REQUEST: "the request's settings or its cache salt are not valid",
    Why.ALL_COMPUTED: "the request needs every token computed, as for prompt logprobs",
    Why.OTHER_CONNECTOR: "another connector of MultiConnector loads the KV, or vLLM computes it to return routed "
    "experts",
    Why.HUB_FAILED: "the hub's answer did not come in time (lookup_timeout_s)",
    Why.MODEL: "this model is served without reuse",
}


CODES = list(Why)
NO_CODE = -1


class NotReused(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a prompt that was computed."""

    span: Span
    code: Why


def not_reused(plan: Sequence[Stretch], unused: Iterable[NotReused]) -> list[NotReused]:
    """The stretches of a prompt that were computed, with the reasons. Where reasons overlap, the later one counts."""
    codes = np.full(plan[-1].span.end if plan else 0, NO_CODE, np.int8)
    for stretch in unused:
        codes[stretch.span.start : stretch.span.end] = CODES.index(stretch.code)
    for part in plan:
        if part.fate not in (Fate.HOLE, Fate.COMPUTED):
            codes[part.span.start : part.span.end] = NO_CODE
    return [NotReused(span, CODES[number]) for span, number in stretches_of(codes) if number != NO_CODE]


def longest(computed: Sequence[NotReused], most: int) -> list[NotReused]:
    """The longest stretches, at most so many, in the order of the prompt."""
    by_length = sorted(computed, key=lambda stretch: -len(stretch.span))
    return sorted(by_length[:most], key=lambda stretch: stretch.span)
