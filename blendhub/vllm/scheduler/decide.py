"""Decides which KV a request reuses: pure arithmetic on the hub's matches and on vLLM's own cached prefix."""

from collections.abc import Sequence
from typing import NamedTuple

from blendhub.client.wire import Found, FoundMap
from blendhub.core.layout import MIN_SEAM_TOKENS
from blendhub.core.spans import Match, Span, join, total
from blendhub.outcome.reasons import NotReused, Why
from blendhub.vllm.costs import Costs
from blendhub.vllm.decision import Choice, Decision, Refusal
from blendhub.vllm.spans import clipped

MAX_RECOMPUTED = 0.8
"""A larger share of what a load covers is not recomputed, holes included, unless the operator's ratio is larger."""
MIN_REUSED_TOKENS = 64
"""The default where times could not be measured."""


OF_STATES = (Why.NO_STATE, Why.NO_MAP)
"""Why stored text of a model with recurrent layers is not reused."""


class Limits(NamedTuple):
    """What a request may reuse at present."""

    ratio: float
    """The share of moved text to recompute for this request."""
    usual_ratio: float
    """The share that the operator set."""
    blends_from: int | None = 0
    """The position from which on moved text and settled KV may be used; None: nowhere."""
    holes: bool = True
    """Whether what lies behind a hole may be used, and the hole be computed apart from the engine's own prefill; if
    not, only what continues vLLM's own cache without a gap can be used."""
    min_reused_tokens: int | None = None
    """The operator's ``policy.min_reused_tokens``."""
    n_positions: int | None = None
    """Keys that were stored for this position or a later one cannot be moved; None: all can."""
    costs: Costs | None = None
    """None if reuse and prefill are not compared by time."""
    has_scratch: bool = True
    """Whether there are blocks for the tokens that recomputation needs and vLLM does not keep."""
    looks_ahead: bool = False
    """Whether a token's KV depends on the one behind it, as that of drafters on hidden states does."""


def decide(found: Found, n_tokens: int, local: int, limits: Limits) -> Choice:
    """Which KV a prompt of ``n_tokens`` reuses, where vLLM has the first ``local`` tokens."""
    costs, ratio, holes, blend = limits.costs, limits.ratio, limits.holes, limits.blends_from is not None
    # The last token is always left to the engine, which needs its logits.
    whole = Span(min(local, n_tokens - 1), n_tokens - 1)
    reachable, unused = _reach(found, limits.n_positions, limits.blends_from)
    usable = _whole_segments(_within(reachable, whole), found, whole.start)
    unmoved = [match for match in usable if not match.moved]
    # A request that asks for more than usual knows what that costs: it must not be refused for it.
    judged = min(ratio, limits.usual_ratio)
    refusal: Refusal | None = None
    # Without holes and moved text, nothing is recomputed; and without text, nothing is loaded.
    texts: Sequence[Sequence[Match]] = (usable, unmoved, _unbroken(unmoved, whole.start), [])
    claims = [_claim(text, whole.start, limits, found.maps) for text in texts]
    seconds = [costs.seconds(claim, n_tokens, judged) if costs else 0.0 for claim in claims]
    for number, best in enumerate(claims):
        fewer = min(range(number, len(claims)), key=seconds.__getitem__)
        obstacle = _too_much(best, judged) or _too_slow(best, seconds[number], claims[fewer], seconds[fewer])
        if not limits.has_scratch and best.recomputes:
            obstacle = Refusal(
                Why.NO_SCRATCH,
                f"vLLM's KV cache has too few free blocks to blend up to token {best.end}: layers with a window lend "
                "from them while a prompt is blended; fewer requests at a time or --gpu-memory-utilization leave more",
            )
        if not obstacle:
            break
        refusal = refusal or obstacle
    reused = total(best.exact) + total(best.settled) + total(best.moved)
    least = limits.min_reused_tokens or (1 if costs else MIN_REUSED_TOKENS)
    is_enough = reused >= least
    if not is_enough:
        refusal = _too_little(found, local, reused, least, blend=blend, obstacle=refusal)
    in_reach = len(reachable) if holes else len(_unbroken(reachable, local))
    for number, match in enumerate(reachable):
        if number >= in_reach:
            unused.append(NotReused(match.span, Why.BEHIND_HOLE))
        elif refusal:
            # Without moved text nothing is too much; what is left was too little, or is too slow to load.
            is_dear = refusal.code in (Why.TOO_MUCH, Why.TOO_SLOW, Why.NO_SCRATCH) and (match.moved or is_enough)
            why = refusal.code if is_dear or refusal.code is Why.TOO_SLOW else Why.TOO_LITTLE
            unused.append(NotReused(match.span, why))
    if limits.looks_ahead and is_enough:
        unused.append(NotReused(Span(best.end, best.end + 1), Why.LAST))
    if found.matches and found.matches[-1].span.end >= n_tokens:
        unused.append(NotReused(Span(n_tokens - 1, n_tokens), Why.LAST))
    return Choice(best if is_enough else None, refusal, tuple(unused))


def _reach(found: Found, n_positions: int | None, blends_from: int | None) -> tuple[list[Match], list[NotReused]]:
    """The parts of matches that a request may use, and the reasons of all other text that is stored."""
    reachable: list[Match] = []
    unused = [
        NotReused(text.span, Why.NOTHING_EXACT if blends_from is None and text.code is not Why.NO_STATE else text.code)
        for text in found.staying
    ]
    for match in found.matches:
        part, (start, end) = match, (match.span.start, match.span.end)
        if not match.exact and (blends_from is None or start < blends_from):
            first = end if blends_from is None else min(end, blends_from)
            unused.append(NotReused(Span(start, first), Why.NOTHING_EXACT))
            part = match.part(first, end)
        part = movable(part, n_positions)
        if part.span.end < end:
            unused.append(NotReused(Span(part.span.end, end), Why.BEYOND))
        if len(part.span):
            reachable.append(part)
    return reachable, unused


def _too_little(found: Found, local: int, reused: int, least: int, *, blend: bool, obstacle: Refusal | None) -> Refusal:
    """Why nothing is reused where only ``reused`` tokens could be."""
    if found.on_the_way:
        return Refusal(
            Why.ON_THE_WAY,
            f"{found.on_the_way_tokens} tokens of this prompt were still being read from the store when the lookup had "
            f"to answer, and {reused} others could be reused; lookup_timeout_s says how long it may take",
        )
    if obstacle:
        return obstacle
    is_stored = bool(found.matches or found.staying)
    if not is_stored and not local:
        return Refusal(Why.NOTHING_STORED, "nothing of this prompt is stored")
    if found.staying and not reused and found.staying[0].code in OF_STATES:
        code, n_tokens = found.staying[0].code, total(text.span for text in found.staying)
        return Refusal(
            code, f"{n_tokens} tokens are not {'reused' if code is Why.NO_STATE else 'moved'}: {code.message}"
        )
    if is_stored and not blend and not any(match.exact for match in found.matches):
        return Refusal(
            Why.NOTHING_EXACT,
            "nothing exact is stored of this prompt: what is stored stands elsewhere, and this request moves no text",
        )
    if found.staying and not found.matches:
        first, n_tokens = found.staying[0], total(text.span for text in found.staying)
        return Refusal(
            Why.SHALLOW if first.code is Why.SHALLOW else Why.NOT_DONATED,
            f"{n_tokens} tokens are not moved: {first.code.message}",
        )
    beyond = f" beyond the {local} in vLLM's own cache" if local else ""
    limit = f"; policy.min_reused_tokens is {least}" if least > 1 else ""
    return Refusal(Why.TOO_LITTLE, f"{reused} tokens could be reused{beyond}{limit}")


def _too_much(claim: Decision, ratio: float) -> Refusal | None:
    """Whether the share of tokens to recompute is so large that blending does not pay."""
    if not claim.moved:
        return None
    share = claim.recomputed_at(ratio) / (claim.end - claim.start)
    if share <= max(MAX_RECOMPUTED, ratio):
        return None
    return Refusal(Why.TOO_MUCH, f"blending would recompute {share:.0%} of what it covers, with the holes in it")


def _too_slow(claim: Decision, seconds: float, fewer: Decision, fewer_s: float) -> Refusal | None:
    """Whether the prompt is sooner done if fewer tokens are reused, or none."""
    if seconds <= fewer_s:
        return None
    instead = f"with reuse up to token {fewer.end}" if fewer.matches else "without"
    return Refusal(
        Why.TOO_SLOW,
        f"the prompt would take about {1000 * seconds:.1f} ms with reuse up to token {claim.end}, and "
        f"{1000 * fewer_s:.1f} ms {instead}; policy.min_reused_tokens lets a number of tokens decide instead",
    )


def _whole_segments(matches: Sequence[Match], found: Found, start: int) -> list[Match]:
    """Where text moves with maps: without moved text of which a part only can be used, or that has no seam before it,
    because vLLM has more of the prompt than it had when it was looked up."""
    whole = {map.span for map in found.maps if map.span.start >= start + MIN_SEAM_TOKENS}
    return [match for match in matches if not (match.moved and found.maps) or match.span in whole]


def _within(matches: Sequence[Match], limits: Span) -> list[Match]:
    kept = []
    for match in matches:
        span = clipped(match.span, limits)
        if len(span):
            kept.append(match.part(span.start, span.end))
    return join(kept)


def movable(match: Match, n_positions: int | None) -> Match:
    """The part of a match whose keys the rotation can reach."""
    if n_positions is None or not match.moved:
        return match
    end = match.span.start + max(n_positions - match.source_start, 0)
    return match.part(match.span.start, min(match.span.end, end))


def _claim(matches: Sequence[Match], start: int, limits: Limits, maps: Sequence[FoundMap]) -> Decision:
    if not limits.holes:
        matches = _unbroken(matches, start)
    if limits.looks_ahead:
        matches = _without_end(matches)
    end = matches[-1].span.end if matches else start
    moved = {match.span for match in matches if match.moved}
    return Decision(start, end, tuple(matches), limits.ratio, tuple(map for map in maps if map.span in moved))


def _without_end(matches: Sequence[Match]) -> Sequence[Match]:
    """All but the last token, behind which another one stood where it was stored. vLLM, too, computes the end of a
    cached prefix anew for such drafters: a whole block."""
    while matches:
        *before, last = matches
        if len(last.span) > 1:
            return [*before, last.part(last.span.start, last.span.end - 1)]
        matches = before
    return matches


def _unbroken(matches: Sequence[Match], at: int) -> list[Match]:
    kept = []
    for match in matches:
        if match.span.start > at:
            break
        kept.append(match)
        at = max(at, match.span.end)
    return kept
