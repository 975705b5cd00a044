"""A hub without KV: the real index, matchers and eviction policy, and arenas of several sizes at once.

The index holds what the largest arena holds. Each arena has an eviction policy by itself, which says which chunks of
the index it holds too. Where an arena has evicted what a prompt repeats, the engine would compute and store it again:
the chunk comes back into that arena. Blended KV is not stored: what it stands for is moved again, and so is what was
computed behind the same text; where an engine has it settled, it is counted as that.
"""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from blendhub.contracts import RunKey
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import MAX_GENERATION, Match, Span, gaps, generation_of
from blendhub.core.tokens import Tokens
from blendhub.framework.host import PluginHost
from blendhub.hub.index.match_queues import MatchThreads
from blendhub.hub.index.namespace_index import Chunk, NamespaceIndex, Origin, Run, content_of
from blendhub.hub.limits import MOST_SLOTS_OF_AN_ARENA
from blendhub.hub.memory.eviction import S3FIFO
from blendhub_tools.analysis.lines import Place

CHUNK_TOKENS = 256
MOST_SLOTS = MOST_SLOTS_OF_AN_ARENA
"""67 million tokens: with more than the largest arena that a hub can have, memory would not be bounded."""

MIN_SAVED_TOKENS = 64
"""Engines do not store shorter stretches between moved text: no lookup would find them."""

ALL_AT_ONCE = 2**62
"""Tokens; everything is matched in the calling thread."""


class Reused(NamedTuple):
    """Tokens of prompts that an arena held."""

    exact: int
    moved: int
    settled: int
    """Text that an arena holds as moved, behind the whole prefix behind which an engine has blended it before."""


class Simulated(NamedTuple):
    """The result of playing one prompt."""

    reused: list[Reused]
    """The tokens that each arena would reuse; the largest arena comes last."""
    matches: list[Match]
    """The matches in the largest arena."""


class SimulatedChunk(Chunk):
    """A chunk of the index, and which arenas it is in."""

    __slots__ = ("arenas",)

    def __init__(self, run: Run, span: Span, content: int) -> None:
        super().__init__(run, span, None, content)
        self.arenas = 0
        """A bit for each arena that holds the chunk."""


class FoundChunk(NamedTuple):
    """The part of a prompt that one chunk holds, in tokens."""

    chunk: SimulatedChunk
    exact: int
    moved: int
    settled: int


class LRU:
    """The order of vLLM's prefix cache: the least recently used chunk is evicted first."""

    def __init__(self) -> None:
        self._longest_unused_first: OrderedDict[SimulatedChunk, None] = OrderedDict()
        self._held: set[SimulatedChunk] = set()

    def insert(self, key: SimulatedChunk, content: int) -> None:
        self._longest_unused_first[key] = None

    def touch(self, key: SimulatedChunk) -> None:
        """The chunk is held: it counts as used when it is released."""

    def hold(self, key: SimulatedChunk) -> None:
        del self._longest_unused_first[key]
        self._held.add(key)

    def release(self, key: SimulatedChunk) -> None:
        self._held.remove(key)
        self._longest_unused_first[key] = None

    def remove(self, key: SimulatedChunk) -> None:
        if key in self._held:
            self._held.remove(key)
        else:
            del self._longest_unused_first[key]

    def evict(self) -> SimulatedChunk | None:
        return self._longest_unused_first.popitem(last=False)[0] if self._longest_unused_first else None

    def __len__(self) -> int:
        return len(self._longest_unused_first) + len(self._held)

    def __contains__(self, key: SimulatedChunk) -> bool:
        return key in self._longest_unused_first or key in self._held


class SimulatedArena:
    """An arena of one size: the chunks in it, and how much they were reused."""

    def __init__(self, number: int, slots: int, policy: LRU | S3FIFO[SimulatedChunk]) -> None:
        self.slots = slots
        self.reused = Reused(0, 0, 0)
        self.evictions = 0
        self._bit = 1 << number
        self._policy = policy
        self._held: list[SimulatedChunk] = []

    def __contains__(self, chunk: SimulatedChunk) -> bool:
        return bool(chunk.arenas & self._bit)

    def read(self, pieces: Iterable[FoundChunk], only_beginning: bool) -> tuple[Reused, list[SimulatedChunk]]:
        """Count what is held of a prompt; returns it and the chunks that are missing.

        The chunks that are held are not evicted until they are released. ``only_beginning``: what follows a missing
        chunk does not count.
        """
        # Most of the time of an analysis is spent here, and in ``store``.
        bit, hold, touch = self._bit, self._policy.hold, self._policy.touch
        held: list[SimulatedChunk] = []
        missing: list[SimulatedChunk] = []
        exact = moved = settled = 0
        for chunk, n_exact, n_moved, n_settled in pieces:
            if chunk.arenas & bit:
                held.append(chunk)
                hold(chunk)
                touch(chunk)
                if not (only_beginning and missing):
                    exact += n_exact
                    moved += n_moved
                    settled += n_settled
            else:
                missing.append(chunk)
        self.reused = Reused(self.reused.exact + exact, self.reused.moved + moved, self.reused.settled + settled)
        self._held = held
        return Reused(exact, moved, settled), missing

    @property
    def room(self) -> int:
        """How many chunks more fit without an eviction."""
        return self.slots - len(self._policy)

    def evict(self) -> SimulatedChunk | None:
        """Evict a chunk and return it; None if all are held."""
        chunk = self._policy.evict()
        if chunk is not None:
            chunk.arenas ^= self._bit
            self.evictions += 1
        return chunk

    def store(self, chunks: Iterable[SimulatedChunk]) -> None:
        """Take these chunks in; those for which there is no room stay outside."""
        bit, insert, room = self._bit, self._policy.insert, self.room
        for chunk in chunks:
            if room > 0:
                room -= 1
            elif self.evict() is None:
                return
            insert(chunk, chunk.content)
            chunk.arenas |= bit

    def remove(self, chunk: SimulatedChunk) -> None:
        """The index forgets the chunk."""
        if chunk in self:
            self._policy.remove(chunk)
            chunk.arenas ^= self._bit

    def release(self) -> None:
        """Let the chunks that the last prompt read be evicted again."""
        for chunk in self._held:
            self._policy.release(chunk)

    @property
    def n_chunks(self) -> int:
        return len(self._policy)

    def check_integrity(self, chunks: Collection[SimulatedChunk]) -> None:
        """Assert that the arena holds no more than it can, and only some of these chunks."""
        assert self.n_chunks <= self.slots
        held = [chunk for chunk in chunks if chunk in self]
        assert all(chunk in self._policy for chunk in held)
        assert len(held) == self.n_chunks, "an arena holds what the index has not"


class SimulatedHub:
    """One namespace of a hub. Prompts are played one after the other."""

    def __init__(
        self,
        host: PluginHost,
        matchers: tuple[PluginChoice, ...],
        slots: Iterable[int],
        only_beginnings: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
        max_generation: int = MAX_GENERATION,
    ) -> None:
        """``max_generation``: as engines are set. ``only_beginnings``: text counts up to the first token that an arena
        lacks, as a prefix cache reuses it, and arenas evict the least recently used chunk, as vLLM does.
        """
        self._layout = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="int8", chunk_tokens=chunk_tokens)
        namespace = Namespace(model="played", layout=self._layout, matchers=matchers)
        self._index = NamespaceIndex(namespace, host, MatchThreads(ALL_AT_ONCE, n_threads=0))
        self.arenas = [
            SimulatedArena(number, size, LRU() if only_beginnings else S3FIFO())
            for number, size in enumerate(sorted(slots))
        ]
        self._only_beginnings = only_beginnings
        self._max_generation = max_generation
        self.places: dict[int, Place] = {}
        """Where in the logs each run in the index was computed."""
        self._ids = itertools.count(1)

    def play(self, tokens: Tokens, place: Place, kept: int = 0) -> Simulated:
        """Look a prompt up as an engine would, and store what is new in it. ``kept``: how much the engine has of it."""
        matches = self._index.match(tokens, 0.0, self._max_generation).matches
        pieces = self._pieces(matches, len(tokens) - 1, kept)
        read = [arena.read(pieces, self._only_beginnings) for arena in self.arenas]
        largest = self.arenas[-1]
        evictions = largest.evictions
        stored = self._store(tokens, matches, place)
        if largest.evictions > evictions:
            # A prompt that is larger than the arena evicts what was just stored of it.
            stored = [chunk for chunk in stored if chunk in largest]
        for arena, (_, missing) in zip(self.arenas[:-1], read, strict=False):
            arena.store([*missing, *stored])
        for arena in self.arenas:
            arena.release()
        return Simulated([reused for reused, _ in read], matches)

    def _pieces(self, matches: Sequence[Match], end: int, kept: int = 0) -> list[FoundChunk]:
        """The part of a prompt, whose last token is at ``end``, in each chunk. A prefix cache goes on up to a gap."""
        counted: dict[Chunk, list[int]] = {}
        reached = 0
        for found in self._index.cut_at_chunks(matches):
            if self._only_beginnings and found.start != reached:
                break
            reached = found.end
            # The engine computes the last token in any case: it needs the logits.
            tokens = (reached if reached < end else end) - found.start
            settled = 0 if found.match.exact else min(max(kept - found.start, 0), tokens)
            counts = counted.setdefault(found.chunk, [0, 0, 0])
            counts[not found.match.exact] += tokens - settled
            counts[2] += settled
        return [FoundChunk(chunk, *tokens) for chunk, tokens in counted.items()]  # type: ignore[arg-type]

    def check_integrity(self) -> None:
        """Assert that no arena holds more than it can, or holds a chunk that the index lacks."""
        self._index.check_integrity()
        chunks = [chunk for chunk in self._index.chunks() if isinstance(chunk, SimulatedChunk)]
        for arena in self.arenas:
            arena.check_integrity(chunks)
        assert self.arenas[-1].n_chunks == len(chunks), "the index holds other chunks than the largest arena"
        assert self.places.keys() == self._index.runs.keys()

    def _store(self, tokens: Tokens, matches: Sequence[Match], place: Place) -> list[SimulatedChunk]:
        """Store the parts of a prompt that are not stored, as an engine's plan does; returns the new chunks."""
        n = len(tokens)
        approximate = next((match.span.start for match in matches if not match.exact), n)
        generation = generation_of(matches)
        stored: list[SimulatedChunk] = []
        for gap in gaps(Span(0, n), (match.span for match in matches)):
            exact = gap.end <= approximate
            if exact or gap.end == n or len(gap) >= MIN_SAVED_TOKENS:
                stored += self._store_run(tokens, gap, Origin(0 if exact else generation), place)
        return stored

    def _store_run(self, tokens: Tokens, span: Span, origin: Origin, place: Place) -> list[SimulatedChunk]:
        largest, index = self.arenas[-1], self._index
        spans: list[Span] = []
        room = largest.room
        for part in self._layout.chunks_of(span):
            if len(spans) >= room:
                evicted = largest.evict()
                if evicted is None:
                    break
                self._forget(evicted)
            spans.append(part)
        if not spans:
            return []
        id = next(self._ids)
        run = Run(id, index, span.start, origin, RunKey(index.digest, str(id)))
        chunks = [SimulatedChunk(run, part, content_of(index.digest, tokens, part)) for part in spans]
        index.publish(run, tokens, [*chunks])
        largest.store(chunks)
        self.places[id] = place
        return chunks

    def _forget(self, chunk: SimulatedChunk) -> None:
        """The largest arena has evicted the chunk."""
        for arena in self.arenas[:-1]:
            arena.remove(chunk)
        self._index.drop(chunk)
        if not chunk.run.chunks:
            self.places.pop(chunk.run.id, None)
