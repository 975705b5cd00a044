"""Makes findings of what an analyzer has counted."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.tools.analysis import advice
from blendhub.tools.analysis.analyzer import Analyzer
from blendhub.tools.analysis.broken import BrokenLines
from blendhub.tools.analysis.findings import (
    About,
    ArenaFound,
    Broken,
    Change,
    Findings,
    FirstToken,
    NamedShares,
    Shares,
    StretchesFound,
    TextFound,
)
from blendhub.tools.analysis.played_hub import CHUNK_TOKENS, PlayedArena
from blendhub.tools.analysis.tallies import Group, Share
from blendhub.tools.analysis.what_if import Tried

MOST_SHOWN = 12
"""The most system prompts, and the most texts, that are shown."""

Show = Callable[[Tokens], str]


def collect(
    seen: Analyzer, tried: Iterable[Tried], broken: BrokenLines, about: About, show: Show | None = None
) -> Findings:
    """Everything that was found. ``show`` makes text of tokens; None: no text is shown."""
    shares = _shares(seen.total)
    arenas = _arenas(seen, about.kv_bytes)
    changes = [_change(one, seen) for one in tried]
    systems = sorted(seen.systems.by_name.items(), key=lambda item: -item[1].share.tokens)
    return Findings(
        about=about,
        verdict=advice.verdict(shares),
        first=_moment(seen.first),
        last=_moment(seen.last),
        shares=shares,
        days=[_named(name, group) for name, group in sorted(seen.days.by_name.items())],
        systems=[_named(name, group, show) for name, group in systems[:MOST_SHOWN]],
        n_systems=len(systems),
        stretches=[
            StretchesFound(1 << power, (2 << power) - 1, number, seen.stretches.tokens[power])
            for power, number in sorted(seen.stretches.numbers.items())
        ],
        texts=[
            TextFound(one.id, one.tokens, one.reuses, str(one.first_seen), _shown(one.head, show))
            for one in seen.texts.most_reused(MOST_SHOWN)
        ],
        arenas=arenas,
        first_token=_first_token(seen, about.prefill_ms_per_1k),
        changes=changes,
        broken=Broken(
            len(broken), dict(broken.reasons.most_common()), [f"{place} {reason}" for place, reason in broken.named]
        ),
        config=advice.config(shares, arenas, changes),
    )


def _shares(counted: Share) -> Shares:
    tokens = counted.tokens or 1
    return Shares(
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
    found: list[ArenaFound] = []
    largest = seen.hub.arenas[-1], seen.prefix_arena(seen.hub.arenas[-1].slots)
    for arena in seen.hub.arenas:
        prefix = seen.prefix_arena(arena.slots)
        found.append(_arena(seen, arena, prefix, kv_bytes))
        if all(one.reused == best.reused for one, best in zip((arena, prefix), largest, strict=True)):
            break
    return found


def _arena(seen: Analyzer, arena: PlayedArena, prefix: PlayedArena, kv_bytes: int) -> ArenaFound:
    tokens = seen.total.tokens
    return ArenaFound(
        tokens=arena.slots * CHUNK_TOKENS,
        gib=arena.slots * CHUNK_TOKENS * kv_bytes / 2**30,
        prefix=prefix.reused.exact / tokens,
        exact=arena.reused.exact / tokens,
        anywhere=sum(arena.reused) / tokens,
        first_token_ratio=seen.costs.ratio(tokens, *arena.reused),
        evictions=arena.evictions,
    )


def _first_token(seen: Analyzer, ms_per_1k: float | None) -> FirstToken:
    """The time to the first token of all prompts together; the quantiles are over single prompts."""
    total = seen.total
    prefix_cache = 1 - total.prefix / (total.tokens or 1)
    mean = seen.costs.ratio(total.tokens, total.exact, total.moved)
    quantiles = seen.ratios.quantile(0.5), seen.ratios.quantile(0.9)
    if ms_per_1k is None:
        return FirstToken(seen.costs, prefix_cache, mean, *quantiles)
    full = ms_per_1k * total.tokens / max(total.requests, 1) / 1000
    return FirstToken(seen.costs, prefix_cache, mean, *quantiles, full, full * prefix_cache, full * mean)


def _change(tried: Tried, seen: Analyzer) -> Change:
    before = seen.what_if
    matchers = [_as_config(one) for one in tried.matchers]
    tokens = before.tokens or 1
    separates = any(one.name == "separator" for one in tried.matchers)
    return Change(tried.what, separates, matchers, before.reused / tokens, tried.reused / tokens, before.tokens)


def _as_config(choice: PluginChoice) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(choice)
    return built if choice.options else {"name": choice.name}


def _moment(time: float | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


def _shown(head: tuple[int, ...], show: Show | None) -> str | None:
    return show(as_tokens(np.array(head, np.uint32))) if show else None
