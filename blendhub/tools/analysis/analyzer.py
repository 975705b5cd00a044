"""Plays prompts, one after the other, and counts how many of their tokens could be reused."""

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.hub.config import PolicyName
from blendhub.tools.analysis.first_token import MEASURED, Costs, Ratios
from blendhub.tools.analysis.played_hub import MOST_SLOTS, PlayedArena, PlayedHub
from blendhub.tools.analysis.requests import Prompt
from blendhub.tools.analysis.tallies import HEAD_TOKENS, Groups, Share, Stretches, Texts, name_of
from blendhub.tools.analysis.what_if import WhatIf


class Sizes(msgspec.Struct, frozen=True):
    """Sizes in chunks."""

    arenas: tuple[int, ...]
    """The arena sizes of the curve; the largest size that can be played is always added."""
    vllm_cache: int | None = None
    """The size of vLLM's own prefix cache; None: as large as the largest arena."""


class Analyzer:
    def __init__(
        self,
        host: PluginHost,
        sizes: Sizes,
        policy: PolicyName = "lru",
        separator: Sequence[int] | None = None,
        costs: Costs = MEASURED,
    ) -> None:
        slots = sorted({*(size for size in sizes.arenas if size < MOST_SLOTS), MOST_SLOTS})
        cache = min(sizes.vllm_cache or MOST_SLOTS, MOST_SLOTS)
        self.hub = PlayedHub(host, DEFAULT_MATCHERS, slots, policy)
        self.prefix_cache = PlayedHub(
            host, (PluginChoice("prefix"),), {*slots, cache}, policy="lru", only_beginnings=True
        )
        """Prefix caches of these sizes, which show what an engine's own cache would reuse."""
        self.total = Share()
        self.days = Groups()
        self.systems = Groups()
        self.stretches = Stretches()
        self.texts = Texts()
        self.costs = costs
        self.ratios = Ratios()
        self.what_if = WhatIf(separator)
        self.first: float | None = None
        self.last: float | None = None
        """The times of the first and the last prompt."""
        self._cache = [arena.slots for arena in self.prefix_cache.arenas].index(cache)

    def add(self, prompt: Prompt, tokens: Tokens) -> None:
        place = prompt.place
        played = self.hub.play(tokens, place)
        prefix = self.prefix_cache.play(tokens, place).reused[self._cache].exact
        reused = played.reused[-1]
        share = Share(1, len(tokens), prefix, reused.exact, reused.moved)
        self.total.add(share)
        self.systems.add(_system(prompt, tokens), share, place, tokens)
        if prompt.time is not None:
            self.first = prompt.time if self.first is None else min(self.first, prompt.time)
            self.last = prompt.time if self.last is None else max(self.last, prompt.time)
            self.days.add(datetime.fromtimestamp(prompt.time, UTC).strftime("%Y-%m-%d"), share, place, tokens)
        self.ratios.add(self.costs.ratio(len(tokens), reused.exact, reused.moved))
        for match in played.matches:
            self.stretches.add(len(match.span))
            self.texts.add(match, tokens, self.hub.places.get(match.run, place))
        self.what_if.add(tokens, place, sum(reused), played.matches)

    def prefix_arena(self, slots: int) -> PlayedArena:
        """The prefix cache with this number of slots, which is one of the sizes of the curve."""
        return next(arena for arena in self.prefix_cache.arenas if arena.slots == slots)


def _system(prompt: Prompt, tokens: Tokens) -> str:
    """The system prompt's name: by its text or, where a log does not separate it, by how the prompt begins."""
    if prompt.system is not None:
        return name_of(prompt.system.encode())
    return name_of(tokens[:HEAD_TOKENS].tobytes())
