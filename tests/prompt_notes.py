"""Notes of prompts, as engines send them to the hub."""

from collections.abc import Mapping, Sequence
from typing import Any

from blendhub.core.spans import Match, Span
from blendhub.outcome.reasons import NotReused, Why
from blendhub.outcome.report import Outcome, PromptReport, ReusedSpans


def prompt_report(
    request: str,
    n_tokens: int,
    engine_tokens: int,
    spans: Mapping[str, Sequence[Span]],
    sources: Sequence[Match] = (),
    reason: str | None = None,
    whys: Mapping[Why, Sequence[Span]] | None = None,
    **more: Any,
) -> PromptReport:
    return Outcome(
        request=request,
        prompt_tokens=n_tokens,
        engine_tokens=engine_tokens,
        spans=ReusedSpans(**{name: tuple(some) for name, some in spans.items()}),
        sources=tuple(sources),
        reason=reason,
        unused=tuple(NotReused(span, why) for why, some in (whys or {}).items() for span in some),
        **more,
    ).note()
