"""Any sequence of calls, compared with a dictionary: hypothesis generates it, and shrinks it when it fails."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.testing.histories import run_histories
from blendhub.testing.sentences import holds
from blendhub.testing.stores.base import ROOMY, StoreTests, content

TIGHT = 9_000
"""A run with the largest chunk, and little more: what is stored is dropped all the time."""
KEYS = [RunKey("one", "a"), RunKey("one", "b"), RunKey("two", "a")]
SPANS = [Span(0, 4), Span(4, 8), Span(2, 6), Span(8, 16)]
SHARDS = [(1500, 1500), (0, 3001), (4000,)]
N_TOKENS = [4, 8, 16, 1000]


class StoreHistory(RuleBasedStateMachine):
    """Calls of a store in any order, and a dictionary that predicts their results."""

    def __init__(self, create: Callable[[Path, int], Store], capacity: int) -> None:
        super().__init__()
        self._place = tempfile.TemporaryDirectory()
        self._create = create
        self._capacity = capacity
        self.store = create(Path(self._place.name) / "store", capacity)
        self.runs: dict[RunKey, StoredRun] = {}
        self.chunks: dict[tuple[RunKey, Span], list[bytes]] = {}
        """The chunks in order of use, the least recently used first."""
        self.used_before_restart: set[tuple[RunKey, Span]] = set()
        """Their order is kept only roughly, but all were used before the others."""
        for key, span in ((KEYS[0], SPANS[0]), (KEYS[0], SPANS[1]), (KEYS[1], SPANS[0])):
            self.save(key, span, SHARDS[0], 0)

    def teardown(self) -> None:
        self.store.close()
        self._place.cleanup()

    @rule(key=st.sampled_from(KEYS), n_tokens=st.sampled_from(N_TOKENS), seed=st.integers(0, 9))
    def save_run(self, key: RunKey, n_tokens: int, seed: int) -> None:
        run = StoredRun(key, content(seed, 4 * n_tokens), content(seed, seed), (Span(0, 4),))  # its chunks are ignored
        if any(name == key and span.end > n_tokens for name, span in self.chunks):
            self.refused(lambda: self.store.save_run(run))
        else:
            dropped = self.store.save_run(run)
            self.runs[key] = run
            self.drop(dropped, keep=key)

    @rule(
        key=st.sampled_from(KEYS), span=st.sampled_from(SPANS), sizes=st.sampled_from(SHARDS), seed=st.integers(0, 999)
    )
    def save(self, key: RunKey, span: Span, sizes: tuple[int, ...], seed: int) -> None:
        shards = [content(seed + rank, size) for rank, size in enumerate(sizes)]
        if not self.has_chunks(key):
            self.save_run(key, 8, seed % 10)  # a run without chunks may have been dropped without a report
        if span.end * 4 > len(self.runs[key].tokens):
            self.refused(lambda: self.store.save(key, span, shards))
            return
        dropped = self.store.save(key, span, shards)
        self.used(key, span, shards)
        self.drop(dropped, keep=key)
        assert (key, span) in self.chunks, "the store reports the saved chunk as dropped"

    def chunk(self, data: st.DataObject) -> tuple[RunKey, Span]:
        """A stored one mostly."""
        return data.draw(st.sampled_from([*self.chunks, (KEYS[0], SPANS[2])]), label="chunk")

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        key, span = self.chunk(data)
        expected = self.chunks.get((key, span))
        buffers = [bytearray(len(shard)) for shard in expected or [b"unknown"]]
        assert self.store.load(key, span, [memoryview(buffer) for buffer in buffers]) == (expected is not None)
        if expected is not None:
            assert buffers == expected
            self.used(key, span, expected)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        key, span = self.chunk(data)
        self.store.discard(key, span)
        if self.chunks.pop((key, span), None) and not self.has_chunks(key):
            del self.runs[key]

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self._create(Path(self._place.name) / "store", self._capacity)
        self.runs = {key: run for key, run in self.runs.items() if self.has_chunks(key)}
        self.used_before_restart = set(self.chunks)

    @invariant()
    def lists_what_it_has(self) -> None:
        expected = {
            key: StoredRun(
                key, run.tokens, run.description, tuple(sorted(span for name, span in self.chunks if name == key))
            )
            for key, run in self.runs.items()
            if self.has_chunks(key)
        }
        assert {run.key: run for run in self.store.runs()} == expected

    @invariant()
    def keeps_within_its_bounds(self) -> None:
        held = sum(len(shard) for shards in self.chunks.values() for shard in shards)
        assert held <= self.store.nbytes <= self.store.capacity == self._capacity
        assert self.store.corrupted == 0

    def has_chunks(self, key: RunKey) -> bool:
        return any(name == key for name, _ in self.chunks)

    def used(self, key: RunKey, span: Span, shards: list[bytes]) -> None:
        self.chunks.pop((key, span), None)
        self.chunks[key, span] = shards
        self.used_before_restart.discard((key, span))

    def drop(self, dropped: list[tuple[RunKey, Span]], keep: RunKey) -> None:
        for entry in dropped:
            assert entry in self.chunks, f"the store reports {entry} as dropped, but it was not stored"
            if entry not in self.used_before_restart:
                assert entry == next(iter(self.chunks)), (
                    f"{entry} was dropped before an entry that was used less recently"
                )
            self.chunks.pop(entry)
            self.used_before_restart.discard(entry)
            if not self.has_chunks(entry[0]) and entry[0] != keep:
                del self.runs[entry[0]]

    def refused(self, call: Callable[[], object]) -> None:
        held = self.store.nbytes
        with pytest.raises(InvalidInput):
            call()
        assert self.store.nbytes == held


@holds("``load`` returns the bytes that ``save`` was given, or nothing.")
class StoreHistoryTests(StoreTests):
    def test_any_history(self) -> None:
        for capacity in (ROOMY, TIGHT):
            run_histories(partial(StoreHistory, self.create, capacity), examples=50, steps=30)
