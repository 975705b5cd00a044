"""Plays prompts, one after the other, and counts how many of their tokens could be reused."""

from collections.abc import Iterator, Sequence

from blendhub.core.layout import MIN_DONOR_CONTEXT
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub_tools.analysis.formats import Prompt
from blendhub_tools.analysis.lines import BrokenLine
from blendhub_tools.analysis.logs import Logs
from blendhub_tools.analysis.replay import CHUNK_TOKENS, MAX_SLOTS, PrefixCache, Replay
from blendhub_tools.analysis.tokenizing import Encoder, encode


class Analyzer:
    """An arena of each size, and a prefix cache beside them, to which all prompts are played."""

    def __init__(
        self,
        host: PluginHost,
        arenas: Sequence[int],
        vllm_cache_tokens: int | None = None,
        min_donor_context: int = MIN_DONOR_CONTEXT,
    ) -> None:
        """``arenas``: sizes in chunks; the largest that can be played is added. ``vllm_cache_tokens``: the size of
        vLLM's own cache; None: as large as the largest arena.
        """
        sizes = sorted({*(size for size in arenas if size < MAX_SLOTS), MAX_SLOTS})
        self.arenas = [Replay(host, size, min_donor_context) for size in sizes]
        self.prefix_cache = PrefixCache(vllm_cache_tokens or MAX_SLOTS * CHUNK_TOKENS)
        self.prompts = self.tokens = self.prefix_tokens = 0
        """The prompts, their tokens, and those of them that a prefix cache alone reuses."""

    def add(self, tokens: Tokens) -> None:
        self.prompts += 1
        self.tokens += len(tokens)
        self.prefix_tokens += self.prefix_cache.play(tokens)
        for arena in self.arenas:
            arena.play(tokens)


BATCH = 256
BATCH_BYTES = 2**22
"""Prompts, and bytes of them, that are tokenised together."""


def play(logs: Logs, encoder: Encoder, analyzer: Analyzer) -> bool:
    """Play all prompts of the logs; returns whether Ctrl-C ended that early."""
    try:
        for batch in _batches(logs):
            for prompt, tokens in zip(batch, encode(batch, encoder), strict=True):
                if isinstance(tokens, BrokenLine):
                    logs.broken.note(prompt.place, str(tokens))
                else:
                    analyzer.add(tokens)
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
