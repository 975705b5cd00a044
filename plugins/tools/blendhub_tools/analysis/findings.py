"""The findings of an analysis as plain data, and the advice: the report and ``--json`` show these."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from blendhub.system.served_vllm import transfer_config
from blendhub_tools.analysis.analyzer import Analyzer, Seconds
from blendhub_tools.analysis.lines import BrokenLines
from blendhub_tools.analysis.replay import CHUNK_TOKENS
from blendhub_tools.analysis.tallies import Costs


class ReuseShares(msgspec.Struct, frozen=True):
    """Prompts, and the shares of their tokens that could be reused."""

    requests: int
    tokens: int
    prefix: float
    """The share that a prefix cache alone reuses."""
    exact: float
    """The share that the hub reuses bit for bit."""
    anywhere: float
    """The share that the hub reuses, wherever the text stands."""


class ArenaFound(msgspec.Struct, frozen=True):
    """What an arena of one size would reuse."""

    tokens: int
    gib: float
    exact: float
    anywhere: float
    first_token_ratio: float
    evictions: int


class EditsFound(msgspec.Struct, frozen=True):
    """Conversations that go on behind an edit."""

    requests: int
    behind: float
    """The share of all tokens that stand behind an edit, where a prefix cache reuses nothing."""
    moved: float
    """The share of these that the hub moves."""


class FirstToken(msgspec.Struct, frozen=True):
    """Times to the first token, relative to full prefills: of all prompts together, and quantiles over prompts."""

    costs: Costs
    prefix_cache: float
    mean: float
    median: float
    ninetieth: float


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The subject and the way of the analysis."""

    files: list[str]
    tokenizer: str
    interrupted: bool
    read_share: float | None
    """The share of the files that was read; None if their size is not known."""
    kv_bytes: int
    """The KV of one token, in bytes."""
    kv_bytes_known: bool
    """Whether ``kv_bytes`` is known; if not, it is the size for many models of 8 billion weights."""
    seconds: Seconds


class Broken(msgspec.Struct, frozen=True):
    """Lines that were not played."""

    number: int
    reasons: dict[str, int]
    named: list[str]
    """The first broken lines."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    about: About
    verdict: str
    first: str | None
    last: str | None
    """The times of the first and the last prompt."""
    shares: ReuseShares
    arenas: list[ArenaFound]
    edits: EditsFound
    first_token: FirstToken
    broken: Broken
    config: dict[str, Any]
    """The value for ``--kv-transfer-config``."""


WORTH_IT = 0.05
"""A share of the tokens, beyond what a prefix cache reuses, below which a connector is not worth its effort."""

WORTH_MOVING = 0.02
NEARLY_ALL = 0.95
"""The share of the largest arena's reuse that the advised arena must reach."""


def collect(seen: Analyzer, broken: BrokenLines, about: About) -> Findings:
    """Everything that was found."""
    total, edits, n_tokens = seen.total, seen.edits, seen.total.tokens
    shares = ReuseShares(
        total.requests, n_tokens, total.prefix / n_tokens, total.exact / n_tokens, total.anywhere / n_tokens
    )
    arenas = _arenas(seen, about.kv_bytes)
    mean = seen.costs.ratio(n_tokens, *seen.arenas[-1].reused)
    settings: dict[str, Any] = {"hub": {"arena_gib": float(f"{advised_arena(arenas).gib:.3g}")}}
    if shares.anywhere - shares.exact < WORTH_MOVING:
        settings["mode"] = "exact"
    first, last = (_moment(time) for time in seen.times or (None, None))
    return Findings(
        about=about,
        verdict=verdict(shares),
        first=first,
        last=last,
        shares=shares,
        arenas=arenas,
        edits=EditsFound(edits.prompts, edits.behind / n_tokens, edits.moved / (edits.behind or 1)),
        first_token=FirstToken(
            seen.costs, 1 - shares.prefix, mean, seen.ratios.quantile(0.5), seen.ratios.quantile(0.9)
        ),
        broken=Broken(
            len(broken), dict(broken.reasons.most_common()), [f"{place} {reason}" for place, reason in broken.named]
        ),
        config=transfer_config(settings),
    )


def verdict(shares: ReuseShares) -> str:
    """One sentence that says whether a hub will help."""
    seen = (
        f"{shares.anywhere:.0%} of the prompt tokens were seen before; a prefix cache would reuse {shares.prefix:.0%}"
    )
    if shares.anywhere < WORTH_IT:
        return f"BlendHub would not help here: {seen}."
    if shares.anywhere - shares.prefix < WORTH_IT:
        return f"BlendHub would reuse little more than a prefix cache: {seen}."
    if shares.anywhere - shares.exact < WORTH_MOVING:
        return f"BlendHub would help with exact reuse alone: {seen}."
    return f"BlendHub would help: {seen}."


def advised_arena(arenas: Sequence[ArenaFound]) -> ArenaFound:
    """The smallest arena that reuses nearly as much as the largest one."""
    return next(arena for arena in arenas if arena.anywhere >= NEARLY_ALL * arenas[-1].anywhere)


def _arenas(seen: Analyzer, kv_bytes: int) -> list[ArenaFound]:
    """All sizes up to the first that is as good as the largest."""
    total = seen.total.tokens
    arenas: list[ArenaFound] = []
    for arena in seen.arenas:
        tokens = arena.slots * CHUNK_TOKENS
        arenas.append(
            ArenaFound(
                tokens=tokens,
                gib=tokens * kv_bytes / 2**30,
                exact=arena.reused.exact / total,
                anywhere=sum(arena.reused) / total,
                first_token_ratio=seen.costs.ratio(total, *arena.reused),
                evictions=arena.cache.evictions,
            )
        )
        if arena.reused == seen.arenas[-1].reused:
            break
    return arenas


def _moment(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")
