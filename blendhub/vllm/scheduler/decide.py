"""Decides what of a request is reused: pure arithmetic on the hub's matches and on vLLM's own cached prefix."""

from collections.abc import Sequence

from blendhub.plan import Match, Span, join
from blendhub.vllm.decision import Decision, Refusal
from blendhub.vllm.settings import ReusePolicy
from blendhub.vllm.spans import clipped, total


def decide(
    matches: Sequence[Match],
    n_tokens: int,
    local: int,
    policy: ReusePolicy,
    *,
    blend: bool,
    holes: bool,
    ratio: float,
    usual_ratio: float,
    on_the_way: int = 0,
    n_positions: int | None = None,
) -> Decision | Refusal:
    """How much of a prompt of ``n_tokens`` to reuse, of which vLLM has the first ``local``.

    ``blend``: moved text and settled KV may be used. ``holes``: what lies behind a hole may be used, and the hole be
    computed apart from the engine's own prefill; if not, only what continues vLLM's own cache without a gap can be
    used. ``ratio``: how much of the moved text this request has recomputed; ``usual_ratio``: how much the engine's
    operator has.
    ``on_the_way``: tokens that ``matches`` lacks, because they are still being read from the store. Keys that were
    stored for position ``n_positions`` or a later one cannot be moved; None: all can.
    """
    # The last token is always left to the engine, which needs its logits.
    open = Span(min(local, n_tokens - 1), n_tokens - 1)
    usable = [match for match in _within(matches, open) if match.exact or blend]
    if n_positions is not None:
        usable = [part for match in usable if len((part := _movable(match, n_positions)).span)]
    best = _claim(usable, open, ratio, holes)
    too_much = ""
    if best.moved:
        # A request that asks for more than usual knows what that costs: it must not be refused for it.
        judged = min(ratio, usual_ratio)
        share = (total(best.holes) + judged * total(best.moved)) / (best.end - best.start)
        if share > policy.max_recompute_share:
            too_much = (
                f"blending would recompute {share:.0%}, policy.max_recompute_share is {policy.max_recompute_share:.0%}"
            )
            best = _claim([match for match in usable if not match.moved], open, ratio, holes)
    reused = total(best.exact) + total(best.settled) + total(best.moved)
    if reused >= policy.min_reused_tokens:
        return best
    if on_the_way:
        return Refusal(
            "on_the_way",
            f"{on_the_way} tokens of this prompt were still being read from the store when the lookup had to answer, "
            f"and {reused} others could be reused; lookup_timeout_s says how long it may take",
        )
    if too_much:
        return Refusal("too_much", too_much)
    if not matches:
        return Refusal("nothing_stored", "nothing of this prompt is stored")
    if not blend and not any(match.exact for match in matches):
        return Refusal(
            "nothing_exact",
            "nothing exact is stored of this prompt: what is stored stands elsewhere, and this request moves no text",
        )
    beyond = f" beyond the {local} in vLLM's own cache" if local else ""
    least = policy.min_reused_tokens
    return Refusal("too_little", f"{reused} tokens could be reused{beyond}; policy.min_reused_tokens is {least}")


def _within(matches: Sequence[Match], limits: Span) -> list[Match]:
    kept = []
    for match in matches:
        span = clipped(match.span, limits)
        if len(span):
            kept.append(match.part(span.start, span.end))
    return join(kept)


def _movable(match: Match, n_positions: int) -> Match:
    """What of a match the rotation reaches."""
    known = match.span.start + max(n_positions - match.source_start, 0)
    return match.part(match.span.start, min(match.span.end, known)) if match.moved else match


def _claim(matches: Sequence[Match], open: Span, ratio: float, holes: bool) -> Decision:
    if not holes:
        matches = _unbroken(matches, open.start)
    end = matches[-1].span.end if matches else open.start
    return Decision(open.start, end, tuple(matches), ratio)


def _unbroken(matches: Sequence[Match], at: int) -> list[Match]:
    kept = []
    for match in matches:
        if match.span.start > at:
            break
        kept.append(match)
        at = match.span.end
    return kept
