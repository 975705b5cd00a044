"""A hub without KV: the real index, matchers and eviction policy, and arenas of several sizes at once.

The index holds what the largest arena holds. Each arena has an eviction policy by itself, which says which chunks of
the index it holds too. Where an arena has evicted what a prompt repeats, the engine would compute and store it again:
the chunk comes back into that arena.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from blendhub.analysis.broken import Place
from blendhub.config import PolicyName
from blendhub.contracts import RunKey
from blendhub.host import PluginHost
from blendhub.hub.eviction import POLICIES, EvictionPolicy
from blendhub.hub.index import Chunk, ChunkMatch, NamespaceIndex, Run, content_of
from blendhub.hub.lanes import LaneThreads
from blendhub.hub.limits import MOST_SLOTS_OF_AN_ARENA
from blendhub.layout import KVLayout, Namespace
from blendhub.plan import Match, Span, gaps
from blendhub.plugin_choice import PluginChoice
from blendhub.tokens import Tokens

CHUNK_TOKENS = 256
MOST_SLOTS = MOST_SLOTS_OF_AN_ARENA
"""67 million tokens: with more than the largest arena that a hub can have, memory would not be bounded."""

MIN_SAVED_TOKENS = 64
"""Engines do not store shorter stretches between moved text: no lookup would find them."""

ALL_AT_ONCE = 2**62
"""Tokens; everything is matched in the calling thread."""


class Reused(NamedTuple):
    """Tokens of one prompt that an arena held."""

    exact: int
    moved: int


class Played(NamedTuple):
    """What became of one prompt."""

    reused: list[Reused]
    """In each arena, the largest last."""
    matches: list[Match]
    """In the largest."""


class PlayedArena:
    """An arena of one size: which chunks are in it, and what it was good for."""

    def __init__(self, slots: int, policy: PolicyName, only_beginnings: bool) -> None:
        self.slots = slots
        self.exact = self.moved = self.evictions = 0
        self._policy: EvictionPolicy[Chunk] = POLICIES[policy]()
        self._only_beginnings = only_beginnings
        self._held: list[Chunk] = []

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._policy

    def read(self, pieces: Sequence[ChunkMatch], end: int) -> tuple[Reused, list[Chunk]]:
        """Count what is held of a prompt, whose last token is at ``end``; returns it and the chunks that are missing.

        The chunks that are held are not evicted until they are released.
        """
        policy = self._policy
        held: dict[Chunk, bool] = {}
        exact = moved = reached = 0
        counts = True
        for piece in pieces:
            chunk = piece.chunk
            is_held = held.get(chunk)
            if is_held is None:
                is_held = held[chunk] = chunk in policy
                if is_held:
                    policy.hold(chunk)
                    policy.touch(chunk)
            if self._only_beginnings:
                counts = counts and is_held and piece.start == reached
                reached = piece.end
            if is_held and counts:
                # The engine computes the last token in any case: it needs the logits.
                tokens = (piece.end if piece.end < end else end) - piece.start
                if piece.match.exact:
                    exact += tokens
                else:
                    moved += tokens
        self.exact += exact
        self.moved += moved
        self._held = [chunk for chunk, is_held in held.items() if is_held]
        return Reused(exact, moved), [chunk for chunk, is_held in held.items() if not is_held]

    def make_room(self, reserved: int = 0) -> tuple[bool, Chunk | None]:
        """Whether there is room for one chunk more than those reserved, and what was evicted for it."""
        if len(self._policy) + reserved < self.slots:
            return True, None
        chunk = self._policy.evict()
        self.evictions += chunk is not None
        return chunk is not None, chunk

    def store(self, chunks: Iterable[Chunk]) -> None:
        """Take these chunks in; those for which there is no room stay outside."""
        for chunk in chunks:
            if self.make_room()[0]:
                self.insert(chunk)

    def insert(self, chunk: Chunk) -> None:
        self._policy.insert(chunk, chunk.content)

    def remove(self, chunk: Chunk) -> None:
        """The index forgets the chunk."""
        if chunk in self._policy:
            self._policy.remove(chunk)

    @property
    def n_chunks(self) -> int:
        return len(self._policy)

    def check_integrity(self, chunks: Collection[Chunk]) -> None:
        """Assert that it holds no more than it can, and only some of these chunks."""
        assert self.n_chunks <= self.slots
        assert sum(chunk in self._policy for chunk in chunks) == self.n_chunks, "an arena holds what the index has not"

    def release(self) -> None:
        """What was read of the last prompt may be evicted again."""
        for chunk in self._held:
            self._policy.release(chunk)


class PlayedHub:
    """One namespace of a hub. Prompts are played one after the other."""

    def __init__(
        self,
        host: PluginHost,
        matchers: tuple[PluginChoice, ...],
        slots: Iterable[int],
        policy: PolicyName = "lru",
        only_beginnings: bool = False,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """``only_beginnings``: text counts up to the first token that an arena lacks, as a prefix cache reuses it."""
        self._layout = KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="int8", chunk_tokens=chunk_tokens)
        namespace = Namespace(model="played", layout=self._layout, matchers=matchers)
        self._index = NamespaceIndex(namespace, host, LaneThreads(ALL_AT_ONCE, n_threads=0))
        self.arenas = [PlayedArena(number, policy, only_beginnings) for number in sorted(slots)]
        self.places: dict[int, Place] = {}
        """Where in the logs each run in the index was computed."""
        self._ids = itertools.count(1)

    @property
    def nbytes(self) -> int:
        """The memory that the matchers use."""
        return self._index.nbytes

    def play(self, tokens: Tokens, place: Place) -> Played:
        """Look a prompt up as an engine would, and store what is new in it."""
        index, end = self._index, len(tokens) - 1
        matches = index.match(tokens)
        pieces = index.cut_at_chunks(matches)
        read = [arena.read(pieces, end) for arena in self.arenas]
        stored = self._store(tokens, matches, place)
        for arena, (_, lacks) in zip(self.arenas[:-1], read, strict=False):
            arena.store(lacks)
            # A prompt that is larger than the largest arena evicts what was just stored of it.
            arena.store(chunk for chunk in stored if chunk in self.arenas[-1])
        for arena in self.arenas:
            arena.release()
        return Played([reused for reused, _ in read], matches)

    def check_integrity(self) -> None:
        """Assert that no arena holds more than it can, or what the index does not have."""
        self._index.check_integrity()
        chunks = set(self._index.chunks())
        for arena in self.arenas:
            arena.check_integrity(chunks)
        assert self.arenas[-1].n_chunks == len(chunks), "the index holds other chunks than the largest arena"
        assert self.places.keys() == self._index.runs.keys()

    def _store(self, tokens: Tokens, matches: Sequence[Match], place: Place) -> list[Chunk]:
        """Store the parts of a prompt that are not stored, as an engine's plan does; returns the new chunks."""
        n = len(tokens)
        approximate = next((match.span.start for match in matches if not match.exact), n)
        stored: list[Chunk] = []
        for gap in gaps(Span(0, n), (match.span for match in matches)):
            exact = gap.end <= approximate
            if exact or gap.end == n or len(gap) >= MIN_SAVED_TOKENS:
                stored += self._store_run(tokens, gap, exact, place)
        return stored

    def _store_run(self, tokens: Tokens, span: Span, exact: bool, place: Place) -> list[Chunk]:
        largest, index = self.arenas[-1], self._index
        spans = []
        for part in self._layout.chunks_of(span):
            has_room, evicted = largest.make_room(len(spans))
            if not has_room:
                break
            if evicted:
                self._forget(evicted)
            spans.append(part)
        if not spans:
            return []
        id = next(self._ids)
        run = Run(id, index, span.start, exact, RunKey(index.digest, str(id)))
        chunks = [Chunk(run, part, None, content_of(index.digest, tokens, part)) for part in spans]
        index.publish(run, tokens, chunks)
        for chunk in chunks:
            largest.insert(chunk)
        self.places[id] = place
        return chunks

    def _forget(self, chunk: Chunk) -> None:
        """The largest arena has evicted the chunk."""
        for arena in self.arenas[:-1]:
            arena.remove(chunk)
        self._index.drop(chunk)
        if not chunk.run.chunks:
            self.places.pop(chunk.run.id, None)
