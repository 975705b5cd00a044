"""The findings of an analysis as plain data, and the advice: the report and ``--json`` show these."""

from typing import Any

import msgspec

from blendhub.system.served_vllm import transfer_config
from blendhub_tools.analysis.analyzer import Analyzer
from blendhub_tools.analysis.lines import BrokenLines
from blendhub_tools.analysis.replay import CHUNK_TOKENS, Replay

USUAL_KV_BYTES = 128 * 1024
"""A token's KV of an unnamed model: 32 layers, 8 KV heads of 128, keys and values, 2 bytes each."""

EXACT_COST, MOVED_COST = 0.03, 0.38
"""What a token costs relative to a computed one, if it is exact, or moved and 30% of its text recomputed."""

WORTH_IT = 0.05
"""A share of the tokens, beyond what a prefix cache reuses, below which a connector is not worth its effort."""

WORTH_MOVING = 0.02
NEARLY_ALL = 0.95
"""The share of the largest arena's reuse that the advised arena must reach."""


class Reuse(msgspec.Struct, frozen=True):
    """What an arena of one size reuses."""

    tokens: int
    gib: float
    """The size."""
    exact: float
    """The share of the prompt tokens that is reused bit for bit."""
    anywhere: float
    """The share that is reused wherever the text stands."""
    first_token: float
    """The time to the first token, relative to full prefill, of all prompts together."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    verdict: str
    prompts: int
    tokens: int
    tokenizer: str
    interrupted: bool
    prefix: float
    """The share of the tokens that a prefix cache alone reuses."""
    exact: float
    anywhere: float
    """The shares of an arena that holds everything."""
    arenas: list[Reuse]
    advised: Reuse
    """The smallest arena that reuses nearly as much as the largest one."""
    kv_bytes: int
    """The KV of one token, in bytes."""
    kv_bytes_assumed: bool
    broken: dict[str, int]
    """The number of lines that were not played, by reason."""
    first_broken: list[str]
    config: dict[str, Any]
    """The value for ``--kv-transfer-config``."""


def collect(
    played: Analyzer, broken: BrokenLines, tokenizer: str, kv_bytes: int | None, *, interrupted: bool
) -> Findings:
    """``kv_bytes``: the KV of one token; None if it is not known."""
    arenas: list[Reuse] = []
    for replay in played.arenas:
        arenas.append(_reuse(replay, played.tokens, kv_bytes or USUAL_KV_BYTES))
        # Larger ones reuse no more.
        if replay.reused == played.arenas[-1].reused:
            break
    most = arenas[-1]
    prefix = played.prefix_tokens / played.tokens
    advised = next(arena for arena in arenas if arena.anywhere >= NEARLY_ALL * most.anywhere)
    settings: dict[str, Any] = {"hub": {"arena_gib": float(f"{advised.gib:.3g}")}}
    if most.anywhere - most.exact < WORTH_MOVING:
        settings["mode"] = "exact"
    return Findings(
        verdict=verdict(prefix, most.exact, most.anywhere),
        prompts=played.prompts,
        tokens=played.tokens,
        tokenizer=tokenizer,
        interrupted=interrupted,
        prefix=prefix,
        exact=most.exact,
        anywhere=most.anywhere,
        arenas=arenas,
        advised=advised,
        kv_bytes=kv_bytes or USUAL_KV_BYTES,
        kv_bytes_assumed=kv_bytes is None,
        broken=dict(broken.reasons.most_common()),
        first_broken=broken.first,
        config=transfer_config(settings),
    )


def verdict(prefix: float, exact: float, anywhere: float) -> str:
    """One sentence that says whether a hub will help."""
    shares = f"{anywhere:.0%} of the prompt tokens could be reused; a prefix cache would reuse {prefix:.0%}"
    if anywhere < WORTH_IT:
        return f"BlendHub would not help here: {shares}."
    if anywhere - prefix < WORTH_IT:
        return f"BlendHub would reuse little more than a prefix cache: {shares}."
    if anywhere - exact < WORTH_MOVING:
        return f"BlendHub would help with exact reuse alone: {shares}."
    return f"BlendHub would help: {shares}."


def _reuse(replay: Replay, n_tokens: int, kv_bytes: int) -> Reuse:
    exact, moved, settled = (count / n_tokens for count in replay.reused)
    return Reuse(
        tokens=replay.slots * CHUNK_TOKENS,
        gib=replay.slots * CHUNK_TOKENS * kv_bytes / 2**30,
        exact=exact,
        anywhere=exact + moved + settled,
        # Settled text is loaded like exact text.
        first_token=1 - (1 - EXACT_COST) * (exact + settled) - (1 - MOVED_COST) * moved,
    )
