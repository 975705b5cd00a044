"""The findings of an analysis as plain data, and the advice: the report and ``--json`` show these."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from blendhub.core.tokens import Tokens, as_tokens
from blendhub.system.served_vllm import transfer_config
from blendhub_tools.analysis.analyzer import Analyzer, Seconds
from blendhub_tools.analysis.lines import BrokenLines
from blendhub_tools.analysis.replay import CHUNK_TOKENS
from blendhub_tools.analysis.tallies import Costs, Group, ReusedTokens


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


class NamedShares(msgspec.Struct, frozen=True):
    name: str
    shares: ReuseShares
    first_seen: str
    text: str | None = None
    """The beginning of the text; None if texts are not shown."""


class ArenaFound(msgspec.Struct, frozen=True):
    """What an arena of one size would reuse."""

    tokens: int
    gib: float
    exact: float
    anywhere: float
    first_token_ratio: float
    evictions: int


class TextFound(msgspec.Struct, frozen=True):
    id: str
    tokens: int
    reuses: int
    first_seen: str
    text: str | None = None


class EditsFound(msgspec.Struct, frozen=True):
    """Conversations that go on behind an edit."""

    requests: int
    behind: float
    """The share of all tokens that stand behind an edit, where a prefix cache reuses nothing."""
    moved: float
    """The share of these that the hub moves."""


class FirstToken(msgspec.Struct, frozen=True):
    """Times to the first token, relative to full prefills."""

    costs: Costs
    prefix_cache: float
    mean: float
    median: float
    ninetieth: float
    """The ratio that nine of ten prompts reach or stay below."""


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
    vllm_cache_tokens: int | None
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
    days: list[NamedShares]
    systems: list[NamedShares]
    """The system prompts with the most tokens, and how many there are."""
    n_systems: int
    texts: list[TextFound]
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


def verdict(shares: ReuseShares) -> str:
    """One sentence that says whether a hub will help."""
    gain = shares.anywhere - shares.prefix
    found = (
        f"{shares.anywhere:.0%} of the prompt tokens were seen before; a prefix cache would reuse {shares.prefix:.0%}"
    )
    if shares.anywhere < WORTH_IT:
        return f"BlendHub would not help here: {found}."
    if gain < WORTH_IT:
        return f"BlendHub would reuse little more than a prefix cache: {found}."
    if shares.anywhere - shares.exact < WORTH_MOVING:
        return f"BlendHub would help with exact reuse alone: {found}."
    return f"BlendHub would help: {found}."


def advised_arena(arenas: Sequence[ArenaFound]) -> ArenaFound:
    """The smallest arena that reuses nearly as much as the largest one."""
    return next(arena for arena in arenas if arena.anywhere >= NEARLY_ALL * arenas[-1].anywhere)


def advised_config(shares: ReuseShares, arenas: Sequence[ArenaFound]) -> dict[str, Any]:
    """The value of ``--kv-transfer-config`` for such prompts."""
    settings: dict[str, Any] = {"hub": {"arena_gib": float(f"{advised_arena(arenas).gib:.3g}")}}
    if shares.anywhere - shares.exact < WORTH_MOVING:
        settings["mode"] = "exact"
    return transfer_config(settings)


MOST_SHOWN = 12
"""The most system prompts, and the most texts, that are shown."""

Show = Callable[[Tokens], str]


def collect(seen: Analyzer, broken: BrokenLines, about: About, show: Show | None = None) -> Findings:
    """Everything that was found. ``show`` makes text of tokens; None: no text is shown."""
    shares = _shares(seen.total)
    arenas = _arenas(seen, about.kv_bytes)
    systems = sorted(seen.systems.by_name.items(), key=lambda item: -item[1].share.tokens)
    return Findings(
        about=about,
        verdict=verdict(shares),
        first=_moment(seen.first),
        last=_moment(seen.last),
        shares=shares,
        days=[_named(name, group) for name, group in sorted(seen.days.by_name.items())],
        systems=[_named(name, group, show) for name, group in systems[:MOST_SHOWN]],
        n_systems=len(systems),
        texts=[
            TextFound(one.id, one.tokens, one.reuses, str(one.first_seen), _shown(one.head, show))
            for one in seen.texts.most_reused(MOST_SHOWN)
        ],
        arenas=arenas,
        edits=_edits(seen),
        first_token=_first_token(seen),
        broken=Broken(
            len(broken), dict(broken.reasons.most_common()), [f"{place} {reason}" for place, reason in broken.named]
        ),
        config=advised_config(shares, arenas),
    )


def _shares(counted: ReusedTokens) -> ReuseShares:
    tokens = counted.tokens or 1
    return ReuseShares(
        counted.requests,
        counted.tokens,
        counted.prefix / tokens,
        counted.exact / tokens,
        counted.anywhere / tokens,
    )


def _named(name: str, group: Group, show: Show | None = None) -> NamedShares:
    return NamedShares(name, _shares(group.share), str(group.first_seen), _shown(group.head, show))


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


def _edits(seen: Analyzer) -> EditsFound:
    edits = seen.edits
    return EditsFound(edits.prompts, edits.behind / (seen.total.tokens or 1), edits.moved / (edits.behind or 1))


def _first_token(seen: Analyzer) -> FirstToken:
    """The time to the first token of all prompts together; the quantiles are over single prompts."""
    total = seen.total
    prefix_cache = 1 - total.prefix / (total.tokens or 1)
    mean = seen.costs.ratio(total.tokens, *seen.arenas[-1].reused)
    return FirstToken(seen.costs, prefix_cache, mean, seen.ratios.quantile(0.5), seen.ratios.quantile(0.9))


def _moment(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


def _shown(head: tuple[int, ...], show: Show | None) -> str | None:
    return show(as_tokens(np.array(head, np.uint32))) if show else None
