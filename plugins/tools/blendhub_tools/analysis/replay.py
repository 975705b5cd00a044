"""What a hub and vLLM's own prefix cache would have of each prompt, if prompts were served one after the other.

A replay has the hub's index, matchers and eviction, and no KV: its arena is a number of slots.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, cast

from blendhub.contracts import RunKey
from blendhub.core.layout import DEFAULT_MATCHERS, MIN_DONOR_CONTEXT, MIN_SAVED_TOKENS, KVLayout, Namespace
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Match, Span, gaps
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.hub.index.match_queues import MatchThreads
from blendhub.hub.index.namespace_index import NamespaceIndex, Run
from blendhub.hub.limits import MAX_SLOTS_OF_AN_ARENA
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.cache import Cache
from blendhub.hub.memory.extents import Extents

CHUNK_TOKENS = 256
MAX_SLOTS = MAX_SLOTS_OF_AN_ARENA
"""67 million tokens: with more than the largest arena that a hub can have, memory would not be bounded."""

ALL_AT_ONCE = 2**62
"""Tokens; everything is matched in the calling thread."""


class Reused(NamedTuple):
    """Tokens of prompts by the KV that is stored of them."""

    exact: int = 0
    moved: int = 0
    settled: int = 0
    """Blended before, behind the same whole prefix."""


class Slots:
    """An arena without memory."""

    def __init__(self, n_bytes: int) -> None:
        self.extents = Extents(n_bytes)
        self.extents.grow(n_bytes)


class Replay:
    """One namespace of a hub, with the default matchers, whose arena has so many slots."""

    def __init__(self, host: PluginHost, slots: int, min_donor_context: int = MIN_DONOR_CONTEXT) -> None:
        layout = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="int8", chunk_tokens=CHUNK_TOKENS)
        namespace = Namespace(model="played", layout=layout, matchers=DEFAULT_MATCHERS)
        self.index = NamespaceIndex(namespace, host, MatchThreads(ALL_AT_ONCE))
        self.cache = Cache(cast(Arena, Slots(slots * namespace.slot_bytes)))
        self.slots = slots
        self._movable_from = min_donor_context
        self.reused = Reused()
        """The sums over all prompts that were played."""
        self._ids = itertools.count(1)

    def play(self, tokens: Tokens) -> list[Match]:
        """Look a prompt up as an engine would, store what is new in it, and count what is reused."""
        matches = self.index.match(tokens, 0.0)
        chunks = dict.fromkeys(part.chunk for part in self.index.cut_at_chunks(matches))
        # While an engine reads them, they are not evicted.
        for chunk in chunks:
            self.cache.pin(chunk)
            self.cache.policy.of(chunk).touch(chunk)
        self._store(tokens, matches)
        for chunk in chunks:
            self.cache.unpin(chunk)
        exact, moved, settled = self.reused
        for match in matches:
            # The engine computes the last token in any case: it needs the logits.
            n_tokens = min(match.span.end, len(tokens) - 1) - match.span.start
            exact += n_tokens if match.exact else 0
            moved += n_tokens if match.moved else 0
            settled += n_tokens if match.settled else 0
        self.reused = Reused(exact, moved, settled)
        return matches

    def _store(self, tokens: Tokens, matches: Sequence[Match]) -> None:
        """Store what is computed, and what is blended, as engines do."""
        n = len(tokens)
        approximate = next((match.span.start for match in matches if not match.exact), n)
        for gap in gaps(Span(0, n), (match.span for match in matches)):
            if gap.end <= approximate:
                self._store_run(tokens, gap, Provenance(donates_from=self._movable_from))
            elif gap.end == n or len(gap) >= MIN_SAVED_TOKENS:
                self._store_run(tokens, gap, Provenance("after_blended", donates_from=self._movable_from))
        moved = [match.span for match in matches if match.moved]
        if moved:
            self._store_run(tokens, Span(moved[0].start, moved[-1].end), Provenance("blended"))

    def _store_run(self, tokens: Tokens, span: Span, provenance: Provenance) -> None:
        namespace = self.index.namespace
        id = next(self._ids)
        run = Run(id, self.index, span.start, provenance, RunKey(self.index.digest, str(id)))
        parts, offsets = [], []
        for part in namespace.chunks_of(span):
            offset = self.cache.allocate(namespace.slot_bytes)
            if offset is None:
                break
            parts.append(part)
            offsets.append(offset)
        if not parts:
            return
        for chunk, offset in zip(self.index.publish(run, tokens, parts), offsets, strict=True):
            self.cache.insert(chunk, offset)


BLOCK_TOKENS = 32


class PrefixCache:
    """vLLM's own cache, of so many tokens: blocks are known by all tokens up to their end, and the one that was not
    used for longest is evicted first.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = max(most_tokens // BLOCK_TOKENS, 1)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def play(self, tokens: Tokens) -> int:
        """How many tokens of a prompt it has; afterwards it has all blocks of the prompt."""
        content, size = tokens.tobytes(), BLOCK_TOKENS * tokens.itemsize
        keys, key = [], 0
        for start in range(0, len(content) - size + 1, size):
            key = hash((key, content[start : start + size]))
            keys.append(key)
        n_cached = next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys))
        # The blocks at the end are evicted before those that they stand behind.
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return min(n_cached * BLOCK_TOKENS, len(tokens) - 1)
