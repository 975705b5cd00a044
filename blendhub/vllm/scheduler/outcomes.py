"""What became of a request, as everyone is told of it."""

import time
from collections.abc import Iterable, Iterator

from blendhub.core.spans import Span, join_spans
from blendhub.outcome.reasons import NotReused, Why
from blendhub.outcome.report import Outcome, ReusedSpans
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.scheduler.request.served_request import ServedRequest
from blendhub.vllm.spans import clipped


def outcome_of(request: ServedRequest) -> Outcome:
    """What became of the request until now. One that was preempted may have found its answer, too, which is no part."""
    reuse, settled = request.reuse, request.blocks.settled
    result, loaded = reuse.result or LoadResult(), reuse.loaded
    prompt = Span(0, request.request.num_prompt_tokens)
    return Outcome(
        request=request.id,
        prompt_tokens=prompt.end,
        engine_tokens=min(request.blocks.engine_tokens, prompt.end),
        spans=ReusedSpans(
            exact=_within(prompt, loaded.exact if loaded else ()),
            settled=_within(prompt, join_spans([*filter(None, [settled]), *(loaded.settled if loaded else [])])),
            moved=_within(prompt, loaded.moved if loaded else ()),
            recomputed=_within(prompt, result.recomputed),
            holes=_within(prompt, loaded.holes if loaded else ()),
        ),
        sources=loaded.sources if loaded else (),
        copied_tokens=reuse.copied_tokens if loaded else 0,
        fetched_tokens=reuse.fetched_tokens if loaded else 0,
        unused=tuple(_unused(request, loaded)),
        reason=result.error or _reason(request, loaded),
        audit=request.repair.audit,
        repair=request.repair.outcome,
        doubt=request.repair.doubt,
        ratio=loaded.ratio if loaded and loaded.moved else None,
        has_found_ratio=bool(loaded and loaded.moved) and request.terms.teaches,
        answer_tokens=request.request.num_output_tokens,
        is_sample=request.repair.is_sample,
        approximate_from=request.first_approximate,
        ended_at=time.time(),
    )


def _within(prompt: Span, spans: Iterable[Span]) -> tuple[Span, ...]:
    return tuple(part for span in spans if len(part := clipped(span, prompt)))


def _reason(request: ServedRequest, loaded: Decision | None) -> str | None:
    reuse = request.reuse
    if reuse.refusal and not loaded:
        return reuse.refusal.message
    return reuse.choice.refusal.message if reuse.choice and reuse.choice.refusal else None


def _unused(request: ServedRequest, loaded: Decision | None) -> Iterator[NotReused]:
    """Why tokens are not reused, if they are not; of spans that overlap, the later one counts."""
    reuse, whole = request.reuse, Span(0, request.request.num_prompt_tokens)
    failed = reuse.result and reuse.result.error
    why = Why.FAILED if failed else reuse.refusal.code if reuse.refusal else Why.ENDED
    if reuse.found is None:
        yield NotReused(whole, why)
        return
    yield NotReused(Span(0, request.prompt_end), Why.NOTHING_STORED)
    if request.has_media:
        yield NotReused(Span(request.prompt_end, whole.end), Why.REQUEST)
    yield from (NotReused(span, Why.ON_THE_WAY) for span in reuse.found.on_the_way)
    if not loaded:
        yield from (NotReused(match.span, why) for match in reuse.found.matches)
    yield from reuse.choice.unused if reuse.choice else ()
