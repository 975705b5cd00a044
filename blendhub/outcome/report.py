"""The outcome of a request: the one record of what became of its prompt. Counts and positions, no text.

The engine makes it, and shows it to observers; responses, the hub's page and ``blendhub explain`` are views of it.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from blendhub.core.spans import Match, Position, Span, total
from blendhub.outcome.fates import Stretch, strip_of
from blendhub.outcome.reasons import NotReused

MAX_SPANS = 2**10
"""The most spans, of each kind, that the hub takes of one request."""

MAX_OUTCOMES = 32
"""The most outcomes in one message."""

LONGEST_NAME = 256
LONGEST_REASON = 1024
Spans = Annotated[tuple[Span, ...], Meta(max_length=MAX_SPANS)]


class AuditOutcome(msgspec.Struct, frozen=True):
    """An answer's first token, predicted from blended KV and from exact KV."""

    agrees: bool
    """Whether the most likely token is the same."""
    kl: float
    """The Kullback-Leibler divergence of the prediction from blended KV from the exact one, in nats."""


class RepairOutcome(msgspec.Struct, frozen=True):
    """Approximate KV was computed anew while the answer was written, or after its end."""

    tokens: Position
    """The number of tokens that were computed anew."""
    exact_from: Position
    """The number of the answer's token, counted from 1, from which on all follow from exact KV."""
    compared: Position = 0
    """The number of the answer's tokens that were compared with what the model predicts from exact KV."""
    differing: Annotated[tuple[Position, ...], Meta(max_length=MAX_SPANS)] = ()
    """Those of them that are not the most likely ones, counted from 0."""


class DoubtOutcome(msgspec.Struct, frozen=True):
    """The model was in doubt about a token that followed from approximate KV."""

    token: Position = 0
    """The number of the answer's token, counted from 1, that waited until all KV was exact; 0 if none did."""
    margin: Annotated[float, Meta(ge=0)] = 0.0
    """By how much the second token was less likely than the first one from approximate KV, in nats."""
    agrees: bool = True
    """Whether the likeliest token is the same from exact KV."""
    kl: float = 0.0
    """The Kullback-Leibler divergence of the prediction from approximate KV from the exact one, in nats."""
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    """How long the token waited."""
    passed: Position = 0
    """The number of tokens before it that the model was in doubt about, and that did not wait."""


class ReusedSpans(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request reused KV, in positions of its prompt."""

    exact: Spans = ()
    moved: Spans = ()
    recomputed: Spans = ()
    """Parts of ``moved``."""
    holes: Spans = ()
    settled: Spans = ()
    """What was reused as it was blended before, behind the same text."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a request's prompt."""

    request: Annotated[str, Meta(max_length=LONGEST_NAME)]
    """vLLM's id of the request."""
    prompt_tokens: Annotated[int, Meta(ge=0, le=2**24)]
    engine_tokens: Position
    """The length of vLLM's own cached prefix."""
    spans: ReusedSpans = ReusedSpans()
    sources: Annotated[tuple[Match, ...], Meta(max_length=MAX_SPANS)] = ()
    """The matches that were loaded."""
    copied_tokens: Position = 0
    """How many of their tokens were copied from blocks that vLLM still had; the others came from the hub."""
    fetched_tokens: Position = 0
    """How many of their tokens the hub had to read from its store; the others were in its memory."""
    unused: Annotated[tuple[NotReused, ...], Meta(max_length=MAX_SPANS)] = ()
    """Why tokens were not reused, if they were not; of spans that overlap, the later one counts."""
    reason: Annotated[str, Meta(max_length=LONGEST_REASON)] | None = None
    """Why nothing was reused, why some of what was found was not, or what went wrong."""
    audit: AuditOutcome | None = None
    repair: RepairOutcome | None = None
    """None if no KV was approximate, or its repair was not ended."""
    doubt: DoubtOutcome | None = None
    """None if the model was in doubt about no token that followed from approximate KV."""
    ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    """The share of the moved text that was to be recomputed; None if no text was moved."""
    has_found_ratio: bool = False
    """Whether the hub has found this ratio, and learns from the request: one without a salt, whose client named none.
    """
    answer_tokens: Position = 0
    """The length of the answer."""
    is_sample: bool = False
    """Whether the audit stands for all requests: the engine chose it, no client did."""
    approximate_from: Position | None = None
    """The position from which on the KV differs from what the model alone computes; None if it differs nowhere."""
    ended_at: Annotated[float, Meta(ge=0)] = 0.0
    """The engine's wall clock, in seconds since 1970."""

    def strip(self) -> list[Stretch]:
        """The whole prompt, in stretches of one fate."""
        return strip_of(self.prompt_tokens, self.engine_tokens, msgspec.structs.asdict(self.spans))

    def response(self, *, explains: bool) -> dict[str, Any]:
        """What the request's response says: numbers of tokens and, where it ``explains``, their places."""
        spans = msgspec.structs.asdict(self.spans)
        facts: dict[str, Any] = {
            "engine_tokens": self.engine_tokens,
            "exact_tokens": total(self.spans.exact),
            "settled_tokens": total(self.spans.settled),
            "moved_tokens": total(self.spans.moved),
            "recomputed_tokens": total(self.spans.recomputed),
            "hole_tokens": total(self.spans.holes),
            "copied_tokens": self.copied_tokens,
            "fetched_tokens": self.fetched_tokens,
            "ratio": self.ratio,
            "spans": {name: [[span.start, span.end] for span in spans[name]] for name in spans}
            if explains and (self.sources or self.spans.settled)
            else None,
            "reason": self.reason,
            "audit": msgspec.to_builtins(self.audit),
            "repair": msgspec.to_builtins(self.repair),
            "doubt": msgspec.to_builtins(self.doubt),
            "approximate_from": self.approximate_from,
        }
        return {name: fact for name, fact in facts.items() if fact is not None}

    def bounded(self) -> "Outcome":
        """The outcome as the hub takes it."""
        spans = {name: coarse(spans, MAX_SPANS) for name, spans in msgspec.structs.asdict(self.spans).items()}
        return msgspec.structs.replace(
            self,
            request=self.request[:LONGEST_NAME],
            spans=ReusedSpans(**spans),
            sources=self.sources[:MAX_SPANS],
            unused=tuple(self.unused[:MAX_SPANS]),
            reason=self.reason[:LONGEST_REASON] if self.reason else None,
        )


def coarse(spans: Sequence[Span], most: int) -> tuple[Span, ...]:
    """At most so many spans of as many tokens, about where these are: neighbours are moved together."""
    step = -(-len(spans) // most) or 1
    groups = (spans[at : at + step] for at in range(0, len(spans), step))
    return tuple(Span(group[0].start, group[0].start + total(group)) for group in groups)
