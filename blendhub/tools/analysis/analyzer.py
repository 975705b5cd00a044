"""Plays prompts, one after the other, and counts how many of their tokens could be reused."""

import contextlib
import gc
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from types import FrameType
from typing import Any

import msgspec

from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Match
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.tools.analysis.formats import Prompt
from blendhub.tools.analysis.lines import BrokenLine, Place
from blendhub.tools.analysis.logs import Logs
from blendhub.tools.analysis.played_hub import MOST_SLOTS, PlayedArena, PlayedHub
from blendhub.tools.analysis.tallies import (
    HEAD_TOKENS,
    MEASURED,
    Costs,
    Groups,
    Ratios,
    Share,
    Stretches,
    Texts,
    name_of,
)
from blendhub.tools.analysis.tokenizing import Encoder

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
        separator: Sequence[int] | None = None,
        costs: Costs = MEASURED,
    ) -> None:
        slots = sorted({*(size for size in sizes.arenas if size < MOST_SLOTS), MOST_SLOTS})
        cache = min(sizes.vllm_cache or MOST_SLOTS, MOST_SLOTS)
        self.hub = PlayedHub(host, DEFAULT_MATCHERS, slots)
        self.prefix_cache = PlayedHub(host, (PluginChoice("prefix"),), {*slots, cache}, only_beginnings=True)
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


BATCH = 256
BATCH_BYTES = 2**22
"""Prompts, and bytes of them, that are tokenised together."""

NEVER = 2**31 - 1
YOUNG_OBJECTS = 50_000
"""So many are made before the next collection: about those of a hundred prompts, which leave hardly any cycles."""

Progress = Callable[[], object]


class Interruption:
    """Ctrl-C ends the reading of logs, wherever it waits, and takes effect after a prompt while one is played.

    A second Ctrl-C ends the process.
    """

    def __init__(self) -> None:
        self.happened = False
        self._may_raise = False

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        former = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    def while_waiting(self, work: Callable[[], Any]) -> Any:
        """The result of reading; None if that was interrupted."""
        try:
            self._may_raise = True
            return None if self.happened else work()
        except KeyboardInterrupt:
            return None
        finally:
            self._may_raise = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.happened = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._may_raise:
            raise KeyboardInterrupt


def play(
    logs: Logs, encoder: Encoder, analyzer: Analyzer, interruption: Interruption, progress: Progress
) -> dict[str, float]:
    """Play all prompts of the logs; returns how many seconds each part of the work took."""
    seconds = dict.fromkeys(("reading", "tokenising", "playing"), 0.0)
    batches = _batches(logs)
    clock = time.perf_counter
    with few_collections():
        while True:
            begun = clock()
            batch = interruption.while_waiting(lambda: next(batches, None))
            read = clock()
            seconds["reading"] += read - begun
            if batch is None:
                return seconds
            encoded = encoder.encode(batch)
            tokenised = clock()
            seconds["tokenising"] += tokenised - read
            for prompt, tokens in zip(batch, encoded, strict=True):
                if isinstance(tokens, BrokenLine):
                    logs.broken.note(prompt.place, str(tokens))
                else:
                    analyzer.add(prompt, tokens)
                if interruption.happened:
                    break
            seconds["playing"] += clock() - tokenised
            progress()


def _batches(logs: Logs) -> Iterator[list[Prompt]]:
    batch: list[Prompt] = []
    size = 0
    for prompt in logs:
        batch.append(prompt)
        size += prompt.size
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """A full collection looks at each chunk that is in the index, and others at what was made for one prompt."""
    former = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, former[1], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*former)
        gc.unfreeze()
