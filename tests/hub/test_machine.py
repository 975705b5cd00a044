"""Any history of real clients that store, look up, stall, crash and reconnect, checked against the tokens.

The clients are those that engines use, over a transport that the test may cut; the test sets their clock and the
hub's. Every byte under a lease is compared, and no process ever has the right to write into a slot that the hub would
allocate to another.
"""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from blendhub.client import wire
from blendhub.contracts import Segment
from blendhub.core.errors import BlendHubError
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from tests.hub.hub_direct import BASE
from tests.hub.lookup_oracle import check_found
from tests.hub.machine_engines import (
    PROMPT,
    PROMPTS,
    SALT,
    SALTED,
    SILENCE_S,
    TEXT,
    TEXTS,
    VARIANT,
    VARIANTS,
    WHICH,
    Engine,
    Line,
    Process,
    Read,
    map_bytes,
)
from tests.hub.machine_writing import WritingRules


class HubMachine(WritingRules):
    def teardown(self) -> None:
        if not hasattr(self, "hub"):
            return
        try:
            self.end()
        finally:
            self.hub.close()
            self.folder.cleanup()

    def end(self) -> None:
        if not self.engines:
            self.join(0)
            self.join(1)
        for engine in self.engines:
            for process in engine.processes:
                process.line.line = Line.GOOD
                while process.writes:
                    process.writes.pop().end()
                process.keep_alive()
        self.look_up_all()
        for engine in list(self.engines):
            self.kill(engine)
        self.children_exit()
        self.hub.settle()
        self.hub.service.tick()
        state = self.hub.state
        state.check_integrity()
        assert len(state.sessions) == len(state.reads.leases) == len(state.writes.leases) == 0
        assert not state.writes.quarantined and not state.ended_but_mapped
        for index in state.indexes:
            for chunk in list(index.chunks()):
                state.cache.erase(chunk)
        assert state.cache.arena.extents.free_bytes == self.hub.arena.name.size, "slots leaked"

    # Reading.

    @rule(
        which=WHICH,
        prompt=PROMPT,
        variant=VARIANT,
        wait_s=st.sampled_from([0.0, 0.5]),
        skip_prefix=st.integers(0, 220),
        settled=st.sampled_from([None, 0.0, 0.3]),
    )
    def look_up(self, which: int, prompt: int, variant: Variant, **asked: Any) -> None:
        self.look_up_by(self.an_engine(which), PROMPTS[prompt], variant, **asked)

    def look_up_by(self, engine: Engine, prompt: np.ndarray, variant: Variant = BASE, **asked: Any) -> None:
        """Each worker that knows the scheduler's hub copies under the lookup's lease."""
        scheduler, settled = engine.scheduler.client, asked.get("settled")
        stored = {chunk for index in self.hub.state.indexes for chunk in index.chunks()}
        with contextlib.suppress(BlendHubError):
            found = scheduler.lookup(prompt, variant, **asked).result()
            check_order([match.span for match in found.matches], asked.get("skip_prefix", 0))
            assert not any(match.settled and (settled is None or match.exact) for match in found.matches)
            assert all(match.moved or match.source_start == match.span.start for match in found.matches)
            index = self.hub.state.indexes.find(scheduler.namespace.digest, variant)
            if index:
                stored &= set(index.chunks())
                check_found(index, stored, self.texts, prompt, found, asked.get("skip_prefix", 0), settled)
            used = {position for match in found.matches for position in range(match.span.start, match.span.end)}
            assert not any(used & set(range(text.span.start, text.span.end)) for text in found.staying)
            assert (found.lease is None) == (not found.matches)
            assert sum(len(piece.span) for piece in found.pieces) == sum(len(match.span) for match in found.matches)
            workers = [worker for worker in engine.workers if worker.client.epoch == scheduler.epoch]
            copies = [copied(worker, found) for worker in workers]
            maps = [[worker.map_in(one.slot).copy() for one in found.maps] for worker in workers]
            if found.lease is not None:
                scheduler.release(found.lease).result()
            for worker, shards in zip(workers, copies, strict=True):
                check(worker, shards, prompt, variant)
            for worker, copied_maps in zip(workers, maps, strict=True):
                for one, copy in zip(found.maps, copied_maps, strict=True):
                    text = prompt[one.span.start : one.span.end]
                    assert np.array_equal(copy, map_bytes(text, worker.mark(variant))), "a map is another segment's"

    def look_up_all(self) -> None:
        for prompt in TEXTS:
            for engine in self.engines:
                for variant in VARIANTS:
                    self.look_up_by(engine, prompt, variant)

    @rule(which=WHICH, prompt=PROMPT, variant=VARIANT, seconds=st.sampled_from([0.0, 1.0]), skip=st.integers(0, 220))
    def look_up_and_read_later(self, which: int, prompt: int, variant: Variant, seconds: float, skip: int) -> None:
        engine = self.an_engine(which)
        with contextlib.suppress(BlendHubError):
            found = engine.scheduler.client.lookup(PROMPTS[prompt], variant, skip_prefix=skip).result()
            check_order([piece.span for piece in found.pieces], skip)
            if found.lease is not None:
                engine.reads.append(Read(found, PROMPTS[prompt], variant))
            self.hub.pass_time(seconds)

    @rule(which=WHICH)
    def read_and_release(self, which: int) -> None:
        engine = self.an_engine(which)
        if engine.reads:
            found, prompt, variant = engine.reads.pop()
            worker = engine.workers[0]
            assert found.lease is not None
            with contextlib.suppress(BlendHubError):  # what was read must not be used then, so it may be anything
                shards = copied(worker, found)
                lease = self.hub.state.reads.leases.get(found.lease)
                is_stored = lease and all(chunk.run.chunks.get(chunk.span.start) is chunk for chunk in lease.chunks)
                worker.client.release(found.lease).result()
                assert is_stored, "what was deleted may be used"
                check(worker, shards, prompt, variant)

    # Deletion.

    @rule(which=WHICH, settled=st.booleans())
    def forget(self, which: int, settled: bool) -> None:
        """Delete what requests with a salt stored, also while others read or write it."""
        if settled:
            self.hub.settle()  # else the store may drop chunks of others meanwhile, to make room for what is saved
        others = self.chunks_of_others()
        try:
            self.an_engine(which).scheduler.client.forget(SALT).result()
        except BlendHubError:
            return
        assert not any(index.runs for index in self.hub.state.indexes if index.namespace.cache_salt == SALT)
        assert not settled or self.chunks_of_others() == others

    @rule(which=WHICH, text=TEXT, other=TEXT)
    def a_reader_is_overtaken_by_a_deletion(self, which: int, text: int, other: int) -> None:
        """What it reads is deleted, and others store meanwhile."""
        engine, quick = self.an_engine(which), self.an_engine(which // 3)
        self.store_by(engine, TEXTS[text], SALTED)
        self.look_up_and_read_later(which, text, SALTED, 0.0, 0)
        self.clear(which, None) if other % 2 else self.forget(which, settled=False)
        self.store_by(quick, TEXTS[other])
        self.read_and_release(which)

    def chunks_of_others(self) -> set[tuple[int, Span]]:
        indexes = [index for index in self.hub.state.indexes if index.namespace.cache_salt != SALT]
        return {(chunk.run.id, chunk.span) for index in indexes for chunk in index.chunks()}

    @rule(which=WHICH, variant=st.sampled_from([None, *VARIANTS]))
    def clear(self, which: int, variant: Variant | None) -> None:
        client = self.an_engine(which).scheduler.client
        with contextlib.suppress(BlendHubError):
            client.clear(variant).result()
            left = [index for index in self.hub.state.indexes if index.base == client.namespace.digest]
            assert not any(i.runs or i.growing for i in left if variant in (None, i.namespace.variant))

    # Time, lines and crashes.

    @rule(which=WHICH, text=TEXT, other=TEXT, begins=st.booleans(), times=st.integers(0, 2))
    def a_write_is_overtaken(self, which: int, text: int, other: int, begins: bool, times: int) -> None:
        """An engine's sessions end by silence and other engines store, before it writes, or meanwhile."""
        slow, quick = self.an_engine(which), self.an_engine(which // 3)
        job = self.reserve_for(slow, TEXTS[text])
        if job and begins:
            self.a_worker(which).begin(job)
        self.hub.pass_time(SILENCE_S + 1)
        for process in (*quick.processes, *slow.processes * times):
            process.keep_alive()
        self.store_by(quick, TEXTS[other])
        if job:
            self.write_all(slow, job, 0.5)
        self.look_up_by(quick, TEXTS[other])

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, 11.0, 11.0, SILENCE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.hub.pass_time(seconds)

    @rule(which=WHICH, line=st.sampled_from(Line))
    def the_line_changes(self, which: int, line: Line) -> None:
        process = self.a_process(which)
        if line is Line.CUT and process.line.line is not Line.CUT:
            process.line.cut()
        process.line.line = line

    @rule(which=WHICH)
    def lines_are_good_again(self, which: int) -> None:
        for process in self.an_engine(which).processes:
            process.line.line = Line.GOOD
            process.keep_alive()

    @rule()
    def all_keep_alive(self) -> None:
        for engine in self.engines:
            for process in engine.processes:
                process.keep_alive()

    @rule(which=WHICH, child_lives=st.booleans())
    def crash(self, which: int, child_lives: bool) -> None:
        self.kill(self.an_engine(which), child_lives)

    @rule()
    @precondition(lambda self: self.orphans)
    def children_end(self) -> None:
        self.children_exit()

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        engine = self.an_engine(which)
        for process in engine.processes:
            process.client.close()
            for job in engine.jobs:
                assert not process.begin(job), "a client that was closed may write"
        self.kill(engine)

    @rule(orderly=st.booleans())
    def the_hub_is_restarted(self, orderly: bool) -> None:
        self.hub.restart()
        self.hub.service._watch.watch = lambda process: None
        if orderly:
            self.all_keep_alive()

    @rule()
    def the_store_catches_up(self) -> None:
        self.hub.settle()

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "hub"):
            self.hub.state.check_integrity()


def check_order(spans: list[Span], skip: int) -> None:
    at = skip
    for span in spans:
        assert span.start >= at and len(span)
        at = span.end


def copied(worker: Process, found: wire.Found) -> list[tuple[Segment, np.ndarray]]:
    return [(piece, worker.client.shard(piece.shard).copy()) for piece in found.pieces]


def check(worker: Process, shards: list[tuple[Segment, np.ndarray]], prompt: np.ndarray, variant: Variant) -> None:
    """Every piece holds the bytes that were written for these tokens at the positions it names."""
    for piece, shard in shards:
        rows = shard.view(np.uint32)[piece.row : piece.row + len(piece.span)]
        expected = prompt[piece.span.start : piece.span.end] ^ worker.mark(variant)
        assert np.array_equal(rows, expected), "a piece holds other KV than was stored"


def histories(n: int, *marks: pytest.MarkDecorator) -> Any:
    """A test of so many histories, each time others."""
    case: Any = type("Histories", (HubMachine.TestCase,), {})
    case.settings = settings(max_examples=n, stateful_step_count=60, suppress_health_check=list(HealthCheck))
    case.pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), *marks]
    return case


TestAnyHistory = histories(75)
TestMoreHistories = histories(300, pytest.mark.long)
