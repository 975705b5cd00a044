"""Decides which KV a request reuses: pure arithmetic on the hub's matches and on vLLM's own cached prefix."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from blendhub.client.wire import Found
from blendhub.core.spans import Match, Span, join, total
from blendhub.outcome.reasons import NotReused, Why
from blendhub.vllm.decision import Choice, Decision, Refusal
from blendhub.vllm.settings import ReusePolicy
from blendhub.vllm.spans import clipped

MOST_RECOMPUTED = 0.8
"""A larger share of what a load covers is not recomputed, holes included, unless the operator's ratio is larger."""


class Pace(NamedTuple):
    """The speed of the coming steps. vLLM computes a prompt whose turn it is with nearly all of a step's budget."""

    engine: int
    """The tokens that vLLM computes in a step."""
    beside: int
    """The tokens that are recomputed in a step that vLLM fills."""
    alone: int
    """The tokens that are recomputed in a step that vLLM leaves empty."""
    full_steps: int
    """The number of steps that vLLM fills with the prompts of other requests."""

    def steps_to_compute(self, n_tokens: int) -> int:
        """How many steps vLLM takes for so many tokens of a prompt."""
        return -(-n_tokens // self.engine)

    def steps_to_recompute(self, n_tokens: int) -> int:
        """How many steps it takes to recompute so many tokens of a prompt."""
        behind = n_tokens - self.full_steps * self.beside
        if behind <= 0:
            return -(-n_tokens // self.beside)
        return self.full_steps + -(-behind // self.alone)


class BlendTerms(NamedTuple):
    """What a request may reuse, and how much of it is recomputed."""

    blend: bool
    """Whether moved text and settled KV may be used."""
    holes: bool
    """Whether what lies behind a hole may be used, and the hole be computed apart from the engine's own prefill; if
    not, only what continues vLLM's own cache without a gap can be used."""
    ratio: float
    """The share of moved text to recompute for this request."""
    usual_ratio: float
    """The share that the operator set."""


class EngineLimits(NamedTuple):
    """What the engine has to blend with at present."""

    n_positions: int | None = None
    """Keys that were stored for this position or a later one cannot be moved; None: all can."""
    pace: Pace | None = None
    """How long recomputation takes; None: as long as computation."""
    has_scratch: bool = True
    """Whether there are blocks for the tokens that recomputation needs and vLLM does not keep."""


def decide(
    found: Found, n_tokens: int, local: int, policy: ReusePolicy, blending: BlendTerms, limits: EngineLimits
) -> Choice:
    """Which KV a prompt of ``n_tokens`` reuses, where vLLM has the first ``local`` tokens."""
    blend, holes, ratio, usual_ratio = blending
    n_positions, pace, has_scratch = limits
    # The last token is always left to the engine, which needs its logits.
    whole = Span(min(local, n_tokens - 1), n_tokens - 1)
    reachable, unused = _reach(found, n_positions, blend=blend)
    usable = _within(reachable, whole)
    unmoved = [match for match in usable if not match.moved]
    # A request that asks for more than usual knows what that costs: it must not be refused for it.
    judged = min(ratio, usual_ratio)
    refusal: Refusal | None = None
    # Without holes and moved text, as in the last of these, nothing is recomputed.
    for claimed in (usable, unmoved, _unbroken(unmoved, whole.start)):
        best = _claim(claimed, whole.start, ratio, holes)
        obstacle = _too_much(best, judged) or _too_slow(best, judged, pace)
        if not has_scratch and best.recomputes:
            obstacle = Refusal(
                Why.NO_SCRATCH,
                f"vLLM's KV cache has too few free blocks to blend up to token {best.end}: layers with a window lend "
                "from them while a prompt is blended; fewer requests at a time or --gpu-memory-utilization leave more",
            )
        if not obstacle:
            break
        refusal = refusal or obstacle
    reused = total(best.exact) + total(best.settled) + total(best.moved)
    is_enough = reused >= policy.min_reused_tokens
    if not is_enough:
        refusal = _too_little(found, local, reused, policy, blend=blend, obstacle=refusal)
    in_reach = len(reachable) if holes else len(_unbroken(reachable, local))
    for number, match in enumerate(reachable):
        if number >= in_reach:
            unused.append(NotReused(match.span, Why.BEHIND_HOLE))
        elif refusal:
            # Without moved text nothing is too much; what is left was too little.
            is_dear = refusal.why in (Why.TOO_MUCH, Why.TOO_SLOW, Why.NO_SCRATCH) and (match.moved or is_enough)
            unused.append(NotReused(match.span, refusal.why if is_dear else Why.TOO_LITTLE))
    if found.matches and found.matches[-1].span.end >= n_tokens:
        unused.append(NotReused(Span(n_tokens - 1, n_tokens), Why.LAST))
    return Choice(best if is_enough else None, refusal, tuple(unused))


def _reach(found: Found, n_positions: int | None, *, blend: bool) -> tuple[list[Match], list[NotReused]]:
    """The parts of matches that a request may use, and the reasons of all other text that is stored."""
    reachable: list[Match] = []
    unused = [NotReused(text.span, text.why if blend else Why.NOTHING_EXACT) for text in found.staying]
    for match in found.matches:
        if not (match.exact or blend):
            unused.append(NotReused(match.span, Why.NOTHING_EXACT))
            continue
        part = movable(match, n_positions)
        if part.span.end < match.span.end:
            unused.append(NotReused(Span(part.span.end, match.span.end), Why.BEYOND))
        if len(part.span):
            reachable.append(part)
    return reachable, unused


def _too_little(
    found: Found, local: int, reused: int, policy: ReusePolicy, *, blend: bool, obstacle: Refusal | None
) -> Refusal:
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
    if is_stored and not blend and not any(match.exact for match in found.matches):
        return Refusal(
            Why.NOTHING_EXACT,
            "nothing exact is stored of this prompt: what is stored stands elsewhere, and this request moves no text",
        )
    if found.staying and not found.matches:
        first, n_tokens = found.staying[0], total(text.span for text in found.staying)
        return Refusal(
            Why.SHALLOW if first.why is Why.SHALLOW else Why.NOT_DONATED,
            f"{n_tokens} tokens are not moved: {first.why.sentence}",
        )
    beyond = f" beyond the {local} in vLLM's own cache" if local else ""
    least = policy.min_reused_tokens
    return Refusal(Why.TOO_LITTLE, f"{reused} tokens could be reused{beyond}; policy.min_reused_tokens is {least}")


def _too_much(claim: Decision, ratio: float) -> Refusal | None:
    """Whether the share of tokens to recompute is so large that blending does not pay."""
    if not claim.moved:
        return None
    share = claim.recomputed_at(ratio) / (claim.end - claim.start)
    if share <= max(MOST_RECOMPUTED, ratio):
        return None
    return Refusal(Why.TOO_MUCH, f"blending would recompute {share:.0%} of what it covers, with the holes in it")


def _too_slow(claim: Decision, ratio: float, pace: Pace | None) -> Refusal | None:
    """Whether vLLM, whose steps are larger, computes the text before the steps recompute a part of the text."""
    if pace is None:
        return None
    unmoved = [match for match in claim.matches if not match.moved]
    kept = total(match.span for match in _unbroken(unmoved, claim.start))
    recomputed, computed = math.ceil(claim.recomputed_at(ratio)), claim.end - claim.start - kept
    slow, fast = pace.steps_to_recompute(recomputed), pace.steps_to_compute(computed)
    if slow <= fast:
        return None
    return Refusal(
        Why.TOO_SLOW,
        f"recomputing {recomputed} tokens would take about {slow} steps, and computing {computed} takes vLLM {fast}; "
        "blend_tokens_per_step says how many tokens a step recomputes at most",
    )


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


def _claim(matches: Sequence[Match], start: int, ratio: float, holes: bool) -> Decision:
    if not holes:
        matches = _unbroken(matches, start)
    end = matches[-1].span.end if matches else start
    return Decision(start, end, tuple(matches), ratio)


def _unbroken(matches: Sequence[Match], at: int) -> list[Match]:
    kept = []
    for match in matches:
        if match.span.start > at:
            break
        kept.append(match)
        at = max(at, match.span.end)
    return kept
