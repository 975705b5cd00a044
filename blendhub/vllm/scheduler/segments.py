"""Which texts of a prompt become segments: texts of models with recurrent layers that prompts repeat.

A segment moves with a map of the states, which is made while its text is computed once more, behind whatever stands
before it in that prompt. The tokens with which the text begins are no part of it: they are computed in each prompt.
"""

from collections.abc import Sequence

from blendhub.core.spans import Span
from blendhub.outcome.reasons import NotReused, Why
from blendhub.vllm.costs import IN_SERVICE, Costs

SEAM_TOKENS = 32
"""The tokens of a text that are computed behind what stands before them, so that the others may move."""
TAIL_TOKENS = 16
"""The last tokens of a repeated text, which may be a chance: what follows a document often begins alike."""
MIN_SEGMENT_TOKENS = 128
MAX_MAP_SHARE = 16
"""A map that takes this many times the memory of the KV of its text is not made."""
MAX_SEGMENTS = 4
"""The most maps that one prompt makes: each is as large as a state, and workers keep them until they are stored."""


def segments_to_make(
    staying: Sequence[NotReused], text: Span, donates_from: int, map_tokens: float, costs: Costs | None
) -> tuple[Span, ...]:
    """The parts of the repeated texts in ``staying`` of which a prompt makes maps.

    ``text``: the part of the prompt that is computed. ``donates_from``: where text begins that may be moved.
    ``map_tokens``: what a map is as large as, in tokens of KV.
    """
    least = max(MIN_SEGMENT_TOKENS, map_tokens / MAX_MAP_SHARE)
    segments: list[Span] = []
    for repeated in staying:
        start = max(max(repeated.span.start, text.start) + SEAM_TOKENS, donates_from)
        end = min(repeated.span.end, text.end) - TAIL_TOKENS
        if repeated.code is Why.NO_MAP and end - start >= least and _pays(Span(start, end), map_tokens, costs):
            segments.append(Span(start, end))
    return tuple(segments[:MAX_SEGMENTS])


def _pays(span: Span, map_tokens: float, costs: Costs | None) -> bool:
    """Whether a prompt that moves the text is done sooner than one that computes it."""
    return costs is None or costs.prefill.sum([span]) > IN_SERVICE * costs.load.token * (len(span) + map_tokens)
