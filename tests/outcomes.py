"""Outcomes of requests, as engines send them to the hub."""

from collections.abc import Mapping, Sequence
from typing import Any

from blendhub.core.spans import Match, Span
from blendhub.outcome.reasons import NotReused, Why
from blendhub.outcome.report import AuditOutcome, Outcome, ReusedSpans


def outcome(
    request: str,
    n_tokens: int,
    engine_tokens: int,
    spans: Mapping[str, Sequence[Span]],
    sources: Sequence[Match] = (),
    reason: str | None = None,
    whys: Mapping[Why, Sequence[Span]] | None = None,
    **more: Any,
) -> Outcome:
    return Outcome(
        request=request,
        prompt_tokens=n_tokens,
        engine_tokens=engine_tokens,
        spans=ReusedSpans(**{name: tuple(of_name) for name, of_name in spans.items()}),
        sources=tuple(sources),
        reason=reason,
        unused=tuple(NotReused(span, why) for why, of_why in (whys or {}).items() for span in of_why),
        **more,
    )


def audited(*agree: bool, is_sample: bool = True) -> tuple[Outcome, ...]:
    """Outcomes of audited requests."""
    audits = [AuditOutcome(agrees, 0.1) for agrees in agree]
    return tuple(outcome("r", 9, 0, {}, audit=audit, is_sample=is_sample) for audit in audits)
