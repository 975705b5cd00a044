"""The outcome of a request, and its two views: the report for clients and observers, and the note that the hub keeps.

Counts and positions, no text.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub.core.spans import Match, Position, Span
from blendhub.outcome.fates import Fate, Stretch, count, shortened, strip_of
from blendhub.outcome.reasons import NotReused, longest, not_reused

MOST_STRETCHES = 512
"""The most stretches of one prompt's strip; a longer strip is shortened to equal parts."""

MOST_SOURCES = 64
MOST_NOT_REUSED = 64
MOST_REPORTS = 32
"""The most reports in one message."""

LONGEST_NAME = 256
LONGEST_REASON = 1024
RequestName = Annotated[str, Meta(max_length=LONGEST_NAME)]


class ReusedSpans(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request reused KV, in positions of its prompt."""

    exact: tuple[Span, ...] = ()
    moved: tuple[Span, ...] = ()
    recomputed: tuple[Span, ...] = ()
    """Parts of ``moved``."""
    holes: tuple[Span, ...] = ()
    settled: tuple[Span, ...] = ()
    """What was reused as it was blended before, behind the same text."""


class AuditOutcome(msgspec.Struct, frozen=True):
    """An answer's beginning, predicted from blended KV and from exact KV. The answer goes on from exact KV."""

    agrees: bool
    """Whether all compared tokens are the same, each the most likely one."""
    kl: float
    """The Kullback-Leibler divergence of the first token's prediction from blended KV from the exact one, in nats."""
    tokens: int
    """The number of compared tokens."""
    agreed_tokens: int
    """How many of them come before the first difference."""


class RequestReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a request's prompt; nothing of its text."""

    request: str
    """vLLM's id of the request."""
    prompt_tokens: Position
    engine_tokens: Position
    """Tokens that were in vLLM's own cache."""
    exact_tokens: Position
    settled_tokens: Position
    moved_tokens: Position
    recomputed_tokens: Position
    hole_tokens: Position
    spans: ReusedSpans | None = None
    """Only for requests that ask for an explanation."""
    reason: str | None = None
    """Why nothing was reused, or what went wrong; None if something was."""
    audit: AuditOutcome | None = None
    """Only for requests that were audited."""
    approximate_from: Position | None = None
    """The position from which on the KV differs from what the model alone computes; None if it differs nowhere."""


class PromptReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the hub keeps of one request that has ended."""

    request: RequestName
    prompt_tokens: Position
    tokens: dict[Fate, Position]
    """The number of tokens of each fate."""
    strip: Annotated[tuple[Stretch, ...], Meta(max_length=MOST_STRETCHES)]
    """The whole prompt, in order."""
    sources: Annotated[tuple[Match, ...], Meta(max_length=MOST_SOURCES)] = ()
    """Where the reused stretches came from; the first ones, if there are more."""
    n_sources: Position = 0
    not_reused: Annotated[tuple[NotReused, ...], Meta(max_length=MOST_NOT_REUSED)] = ()
    """Why stretches were computed; the longest ones, if there are more. Empty where that is not known."""
    n_not_reused: Position = 0
    reason: Annotated[str, Meta(max_length=LONGEST_REASON)] | None = None
    """Why nothing was reused, or what went wrong."""
    ended_at: Annotated[float, Meta(ge=0)] = 0.0
    """The hub's wall clock, in seconds since 1970."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request's prompt. Reports, notes and counters are made from it."""

    request: str
    prompt_tokens: int
    engine_tokens: int
    """The length of vLLM's own cached prefix."""
    spans: ReusedSpans = ReusedSpans()
    hole_tokens: int = 0
    sources: tuple[Match, ...] = ()
    """The matches that were loaded."""
    unused: tuple[NotReused, ...] = ()
    """Why tokens were not reused, if they were not; of spans that overlap, the later one counts."""
    reason: str | None = None
    """Why nothing was reused, why some of what was found was not, or what went wrong."""
    has_failed: bool = False
    """Whether stored KV could not be loaded."""
    load_seconds: float = 0.0
    probe_seconds: float = 0.0
    recompute_seconds: float = 0.0
    audit: AuditOutcome | None = None
    approximate_from: int | None = None

    def report(self, *, explains: bool) -> RequestReport:
        """The report for clients and observers."""
        spans = self.spans
        return RequestReport(
            request=self.request,
            prompt_tokens=self.prompt_tokens,
            engine_tokens=self.engine_tokens,
            exact_tokens=_total(spans.exact),
            settled_tokens=_total(spans.settled),
            moved_tokens=_total(spans.moved),
            recomputed_tokens=_total(spans.recomputed),
            hole_tokens=self.hole_tokens,
            spans=spans if explains and (self.sources or spans.settled) else None,
            reason=self.reason,
            audit=self.audit,
            approximate_from=self.approximate_from,
        )

    def note(self) -> PromptReport:
        """The note for the hub, within the bounds of a message."""
        strip = strip_of(self.prompt_tokens, self.engine_tokens, msgspec.structs.asdict(self.spans))
        computed = not_reused(strip, self.unused)
        return PromptReport(
            request=self.request[:LONGEST_NAME],
            prompt_tokens=self.prompt_tokens,
            tokens={fate: n for fate, n in count(strip).items() if n},
            strip=tuple(shortened(strip, MOST_STRETCHES)),
            sources=self.sources[:MOST_SOURCES],
            n_sources=len(self.sources),
            not_reused=tuple(longest(computed, MOST_NOT_REUSED)),
            n_not_reused=len(computed),
            reason=self.reason[:LONGEST_REASON] if self.reason else None,
        )


def _total(spans: Iterable[Span]) -> int:
    return sum(len(span) for span in spans)
