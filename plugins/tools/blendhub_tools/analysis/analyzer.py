"""Plays prompts, one after the other, and counts how many of their tokens could be reused."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import msgspec

from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub_tools.analysis.edits import Edits
from blendhub_tools.analysis.formats import Prompt
from blendhub_tools.analysis.lines import BrokenLine
from blendhub_tools.analysis.logs import Logs
from blendhub_tools.analysis.simulated_hub import MOST_SLOTS, SimulatedArena, SimulatedHub
from blendhub_tools.analysis.tallies import HEAD_TOKENS, MEASURED, Costs, Groups, Ratios, ReusedTokens, Texts, name_of
from blendhub_tools.analysis.tokenizing import Encoder


class Sizes(msgspec.Struct, frozen=True):
    """Sizes in chunks."""

    arenas: tuple[int, ...]
    """The arena sizes of the curve; the largest size that can be played is always added."""
    vllm_cache: int | None = None
    """The size of vLLM's own prefix cache; None: as large as the largest arena."""


class Analyzer:
    def __init__(self, host: PluginHost, sizes: Sizes, costs: Costs = MEASURED) -> None:
        slots = sorted({*(size for size in sizes.arenas if size < MOST_SLOTS), MOST_SLOTS})
        cache = min(sizes.vllm_cache or MOST_SLOTS, MOST_SLOTS)
        self.hub = SimulatedHub(host, DEFAULT_MATCHERS, slots)
        self.prefix_cache = SimulatedHub(host, (PluginChoice("prefix"),), {*slots, cache}, only_beginnings=True)
        """Prefix caches of these sizes, which show what an engine's own cache would reuse."""
        self.total = ReusedTokens()
        self.days = Groups()
        self.systems = Groups()
        self.texts = Texts()
        self.edits = Edits()
        self.costs = costs
        self.ratios = Ratios()
        self.first: float | None = None
        self.last: float | None = None
        """The times of the first and the last prompt."""
        self._cache = [arena.slots for arena in self.prefix_cache.arenas].index(cache)

    def add(self, prompt: Prompt, tokens: Tokens) -> None:
        place = prompt.place
        cached = self.prefix_cache.play(tokens, place).reused
        prefix = cached[self._cache].exact
        played = self.hub.play(tokens, place, kept=prefix)
        reused = played.reused[-1]
        share = ReusedTokens(1, len(tokens), prefix, reused.exact, reused.moved + reused.settled)
        self.total.add(share)
        if (begins := prompt.conversation) is not None:
            self.edits.add(name_of(begins.encode()), len(tokens), cached[-1].exact, played.matches)
        self.systems.add(_system(prompt, tokens), share, place, tokens)
        if prompt.time is not None:
            self.first = prompt.time if self.first is None else min(self.first, prompt.time)
            self.last = prompt.time if self.last is None else max(self.last, prompt.time)
            self.days.add(datetime.fromtimestamp(prompt.time, UTC).strftime("%Y-%m-%d"), share, place, tokens)
        self.ratios.add(self.costs.ratio(len(tokens), *reused))
        for match in played.matches:
            self.texts.add(match, tokens, self.hub.places.get(match.run, place))

    def prefix_arena(self, slots: int) -> SimulatedArena:
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
"""New objects before the next collection: about those of a hundred prompts, which leave hardly any cycles."""

Progress = Callable[[], object]


class Seconds(msgspec.Struct):
    """How long each part of the work took."""

    reading: float = 0.0
    tokenising: float = 0.0
    playing: float = 0.0


def play(logs: Logs, encoder: Encoder, analyzer: Analyzer, seconds: Seconds, progress: Progress) -> bool:
    """Play all prompts of the logs, and add up the time; returns whether Ctrl-C ended that early."""
    clock = time.perf_counter
    done = clock()
    try:
        with few_collections():
            for batch in _batches(logs):
                read = clock()
                seconds.reading += read - done
                encoded = encoder.encode(batch)
                tokenised = clock()
                seconds.tokenising += tokenised - read
                for prompt, tokens in zip(batch, encoded, strict=True):
                    if isinstance(tokens, BrokenLine):
                        logs.broken.note(prompt.place, str(tokens))
                    else:
                        analyzer.add(prompt, tokens)
                done = clock()
                seconds.playing += done - tokenised
                progress()
    except KeyboardInterrupt:
        return True
    return False


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
