"""Plays prompts, one after the other, and counts how many of their tokens could be reused."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from blendhub.core.layout import DEFAULT_MATCHERS
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub_tools.analysis.edits import Edits
from blendhub_tools.analysis.formats import Prompt
from blendhub_tools.analysis.lines import BrokenLine
from blendhub_tools.analysis.logs import Logs
from blendhub_tools.analysis.replay import CHUNK_TOKENS, MOST_SLOTS, PrefixCache, Replay
from blendhub_tools.analysis.tallies import MEASURED, Costs, Ratios, ReusedTokens
from blendhub_tools.analysis.tokenizing import Encoder


class Analyzer:
    def __init__(
        self, host: PluginHost, arenas: Sequence[int], costs: Costs = MEASURED, vllm_cache_tokens: int | None = None
    ) -> None:
        """``arenas``: sizes in chunks; the largest that can be played is added. ``vllm_cache_tokens``: the size of
        vLLM's own cache; None: as large as the largest arena.
        """
        sizes = sorted({*(size for size in arenas if size < MOST_SLOTS), MOST_SLOTS})
        self.arenas = [Replay(host, DEFAULT_MATCHERS, size) for size in sizes]
        self.prefix_cache = PrefixCache(vllm_cache_tokens or MOST_SLOTS * CHUNK_TOKENS)
        self.total = ReusedTokens()
        self.edits = Edits()
        self.costs = costs
        self.ratios = Ratios()
        self.times: tuple[float, float] | None = None
        """Of the first and the last prompt."""

    def add(self, prompt: Prompt, tokens: Tokens) -> None:
        prefix = self.prefix_cache.play(tokens)
        for arena in self.arenas[:-1]:
            arena.play(tokens)
        reused, matches = self.arenas[-1].play(tokens)
        self.total.add(len(tokens), prefix, reused.exact, reused.moved + reused.settled)
        if (begins := prompt.conversation) is not None:
            self.edits.add(hash(begins), len(tokens), prefix, matches)
        if prompt.time is not None:
            first, last = self.times or (prompt.time, prompt.time)
            self.times = min(first, prompt.time), max(last, prompt.time)
        self.ratios.add(self.costs.ratio(len(tokens), *reused))


BATCH = 256
BATCH_BYTES = 2**22
"""Prompts, and bytes of them, that are tokenised together."""

NEVER = 2**31 - 1
YOUNG_OBJECTS = 50_000
"""New objects before the next collection: about those of a hundred prompts, which leave hardly any cycles."""


class Seconds(msgspec.Struct):
    """How long each part of the work took."""

    reading: float = 0.0
    tokenising: float = 0.0
    playing: float = 0.0


def play(logs: Logs, encoder: Encoder, analyzer: Analyzer, seconds: Seconds, progress: Callable[[], object]) -> bool:
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
