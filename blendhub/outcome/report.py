"""The report of a request's prompt, as engines send it to the hub: counts and positions, no text."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub.core.layout import Variant
from blendhub.core.spans import Match, Span
from blendhub.outcome.fates import Fate, Stretch, count, shortened, strip_of
from blendhub.outcome.reasons import NotReused, Why, longest, not_reused

MOST_STRETCHES = 512
"""The most stretches of one prompt's strip; a longer strip is shortened to equal parts."""

MOST_SOURCES = 64
MOST_NOT_REUSED = 64
MOST_REPORTS = 32
"""The most reports in one message."""

LONGEST_NAME = 256
LONGEST_REASON = 1024
Tokens = Annotated[int, Meta(ge=0, le=2**40)]
RequestName = Annotated[str, Meta(max_length=LONGEST_NAME)]


class Painted(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a prompt, in few bytes."""

    span: Span
    fate: Fate


class PromptReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of one request that has ended."""

    request: RequestName
    prompt_tokens: Tokens
    tokens: dict[Fate, Tokens]
    """The number of tokens of each fate."""
    strip: Annotated[tuple[Painted, ...], Meta(max_length=MOST_STRETCHES)]
    """The whole prompt, in order."""
    sources: Annotated[tuple[Match, ...], Meta(max_length=MOST_SOURCES)] = ()
    """Where the reused stretches came from; the first ones, if there are more."""
    n_sources: Tokens = 0
    not_reused: Annotated[tuple[NotReused, ...], Meta(max_length=MOST_NOT_REUSED)] = ()
    """Why stretches were computed; the longest ones, if there are more. Empty where that is not known."""
    n_not_reused: Tokens = 0
    reason: Annotated[str, Meta(max_length=LONGEST_REASON)] | None = None
    """Why nothing was reused, or what went wrong."""
    variant: Variant | None = None
    """The request's variant, by which the hub finds the text of the sources. The hub never shows the variant."""
    ended_at: Annotated[float, Meta(ge=0)] = 0.0
    """The hub's wall clock, in seconds since 1970."""

    def stretches(self) -> list[Stretch]:
        return [Stretch(one.span, one.fate) for one in self.strip]


def prompt_report(
    request: str,
    n_tokens: int,
    engine_tokens: int,
    spans: Mapping[str, Sequence[Span]],
    sources: Sequence[Match] = (),
    reason: str | None = None,
    whys: Mapping[Why, Sequence[Span]] = MappingProxyType({}),
    variant: Variant | None = None,
) -> PromptReport:
    """``engine_tokens`` were in vLLM's own cache; ``spans`` are those that a response reports, by their names there.

    ``whys``: why tokens were not reused, if they were not; of reasons that overlap, the later one counts.
    """
    plan = strip_of(n_tokens, engine_tokens, spans)
    computed = not_reused(plan, whys)
    return PromptReport(
        request=request[:LONGEST_NAME],
        prompt_tokens=n_tokens,
        tokens={fate: n for fate, n in count(plan).items() if n},
        strip=tuple(Painted(one.span, one.fate) for one in shortened(plan, MOST_STRETCHES)),
        sources=tuple(sources[:MOST_SOURCES]),
        n_sources=len(sources),
        not_reused=tuple(longest(computed, MOST_NOT_REUSED)),
        n_not_reused=len(computed),
        reason=reason[:LONGEST_REASON] if reason else None,
        variant=variant,
    )
