"""Tries other matchers on the first prompts of a log."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Match
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.tools.analysis.broken import Place
from blendhub.tools.analysis.played_hub import MOST_SLOTS, PlayedHub

TRIED_TOKENS = 2_000_000
"""The number of tokens, from the log's beginning, that other matchers are tried on."""

SHORTER = 32
"""The smallest ``min_match_tokens`` that is of use: ``rolling_hash`` looks for windows of 32 tokens."""

LEAST_SHARE = 0.2
"""A token that stands before a smaller share of the reused stretches is no separator."""


class Tried(msgspec.Struct, frozen=True):
    """Matchers, and what they found."""

    what: str
    matchers: tuple[PluginChoice, ...]
    reused: int
    """The number of reused tokens."""


class WhatIf:
    """Keeps the log's first prompts, and plays them again with other matchers."""

    def __init__(self, separator: Sequence[int] | None = None, most_tokens: int = TRIED_TOKENS) -> None:
        self.tokens = 0
        self.reused = 0
        """The tokens that the matchers in use reuse: the baseline for other matchers."""
        self._separator = tuple(separator or ())
        self._most = most_tokens
        self._prompts: list[tuple[Tokens, Place]] = []
        self._before: Counter[int] = Counter()
        """How often each token stands before a reused stretch."""

    def add(self, tokens: Tokens, place: Place, reused: int, matches: Sequence[Match]) -> None:
        """Add a prompt, and the tokens of it that are reused."""
        if self.tokens >= self._most:
            return
        self._prompts.append((tokens, place))
        self.tokens += len(tokens)
        self.reused += reused
        for match in matches:
            if not match.exact and match.span.start:
                self._before[int(tokens[match.span.start - 1])] += 1

    def separator(self) -> tuple[int, ...]:
        """The separator that was named, or the token that stands before many reused stretches; empty if none does."""
        if self._separator or not self._before:
            return self._separator
        token, number = self._before.most_common(1)[0]
        return (token,) if number >= LEAST_SHARE * self._before.total() else ()

    def tried(self, host: PluginHost) -> list[Tried]:
        """What each change would find. Takes as long as playing these prompts once for each."""
        prefix, rolling = DEFAULT_MATCHERS
        shorter = PluginChoice(rolling.name, {"min_match_tokens": SHORTER})
        changes: list[tuple[str, tuple[PluginChoice, ...]]] = [
            (f"min_match_tokens {SHORTER} instead of 64", (prefix, shorter))
        ]
        if separator := self.separator():
            known = PluginChoice("separator", {"separator": list(separator)})
            changes.append((f"the matcher separator too, with tokens {list(separator)}", (prefix, rolling, known)))
        return [Tried(what, matchers, self._play(host, matchers)) for what, matchers in changes]

    def _play(self, host: PluginHost, matchers: tuple[PluginChoice, ...]) -> int:
        hub = PlayedHub(host, matchers, [MOST_SLOTS])
        for tokens, place in self._prompts:
            hub.play(tokens, place)
        (arena,) = hub.arenas
        return sum(arena.reused)
