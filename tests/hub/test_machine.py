"""Any history of real clients that store, look up, stall, crash and reconnect, checked against the tokens.

The clients are those that engines use, over a transport that the test may cut; the test sets their clock and the
hub's. Every byte under a lease is compared, and no process ever has the right to write into a slot that the hub would
allocate to another.
"""

import contextlib
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from direct_transport import DirectConnection, Line, connect
from hub_direct import DirectHub, marks, namespace, tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blendhub import wire
from blendhub.client import HubClient, Reservation
from blendhub.config import HubConfig
from blendhub.errors import BlendHubError, LeaseError
from blendhub.plan import Match, Span
from blendhub.processes import ProcessId

LEASE_S, SILENCE_S = 10.0, 25.0
MODELS = [namespace("a"), namespace("b", world_size=2)]
TEXTS = [tokens(seed, length) for seed, length in enumerate((40, 64, 96, 150, 200))]
WHICH = st.integers(0, 999)
PROMPTS = [*TEXTS, np.concatenate([TEXTS[3][20:120], TEXTS[1]]), np.concatenate([tokens(99, 17), TEXTS[4]])]

TEXT = st.integers(0, len(TEXTS) - 1)
PROMPT = st.integers(0, len(PROMPTS) - 1)


class Job:
    """A text that an engine stores, with its write lease."""

    def __init__(self, reserved: Reservation, text: np.ndarray) -> None:
        assert reserved.right
        self.right = reserved.right
        self.slots = reserved.slots
        self.span = reserved.span
        self.text = text


class Write:
    """A write that has begun with a valid right; the bytes follow later, through the mapping of that moment."""

    def __init__(self, process: "Process", job: Job) -> None:
        self.job = job
        self.rank = process.rank
        self._end = ExitStack()
        self._end.enter_context(process.client.writing(job.right))
        self._shards = [process.client.shard(slot.slot) for slot in job.slots]

    def write(self) -> None:
        for slot, shard in zip(self.job.slots, self._shards, strict=True):
            shard[: 4 * len(slot.span)] = marks(self.job.text, slot.span, self.rank)
            shard[4 * len(slot.span) :] = 0xEE

    def end(self) -> None:
        self._shards.clear()
        self._end.close()


class Process:
    """A client in a process that the test may stop, cut off and kill."""

    def __init__(self, machine: "HubMachine", engine: str, model: int, rank: int) -> None:
        self.machine, self.rank = machine, rank
        self.client: HubClient
        self.line: DirectConnection
        # Pids beyond those that the kernel gives.
        machine.started += 1
        process = ProcessId(ProcessId.mine().host, 2**23 + machine.started, rank)
        self.client, self.line = connect(machine.hub, process, lambda: machine.hub.now)
        self.client.register(engine, MODELS[model], rank)
        self.writes: list[Write] = []

    def begin(self, job: Job) -> Write | None:
        """The right to write, if the client has it."""
        try:
            write = Write(self, job)
        except LeaseError:
            return None
        self.writes.append(write)
        return write

    def commit(self, job: Job, upto: int) -> None:
        if upto < job.span.end and any(write.job is job for write in self.writes):
            return  # it would vouch for what it still writes
        with contextlib.suppress(BlendHubError):
            self.client.commit(job.right, upto)

    def end_writes(self) -> None:
        while self.writes:
            self.writes.pop().end()

    def exit(self) -> None:
        """The kernel removes the mapping."""
        self.end_writes()
        self.client.arena = None

    def keep_alive(self) -> None:
        with contextlib.suppress(BlendHubError):
            self.client.keep_alive()


class Engine:
    """A scheduler, which reserves and looks up, and workers, which write and read."""

    def __init__(self, machine: "HubMachine", number: int, model: int) -> None:
        self.scheduler = Process(machine, f"engine-{number}", model, -1)
        self.workers = [Process(machine, f"engine-{number}", model, n) for n in range(MODELS[model].world_size)]
        self.jobs: list[Job] = []
        self.reads: list[tuple[wire.Found, np.ndarray]] = []

    @property
    def processes(self) -> list[Process]:
        return [self.scheduler, *self.workers]


class HubMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "s3fifo"]), stored=st.booleans(), n_slots=st.integers(8, 48))
    def start(self, policy: str, stored: bool, n_slots: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        config = HubConfig(
            policy=policy, read_lease_s=LEASE_S, write_lease_s=LEASE_S, silence_s=SILENCE_S, wait_for_store_s=0.2
        )
        self.hub = DirectHub(config, n_slots, Path(self.folder.name) / "store" if stored else None)
        self.hub.service._watch.watch = lambda process: None  # the processes are made up
        self.engines: list[Engine] = []
        self.orphans: list[Process] = []
        """Dead processes whose forked children still have their mappings."""
        self.started = self.n_engines = 0
        for model in (0, 1):
            self.join(model)

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
                process.end_writes()
                process.keep_alive()
        for prompt in TEXTS:
            for engine in self.engines:
                self.look_up_by(engine, prompt, 0.0, 0)
        for engine in list(self.engines):
            self.kill(engine)
        self.children_exit()
        self.hub.settle()
        self.hub.service.tick()
        self.hub.state.check_integrity()
        state = self.hub.state
        assert len(state.sessions) == len(state.reads.leases) == len(state.writes.leases) == 0
        assert not state.writes.quarantined and not state.ended_but_mapped
        for index in state.indexes.values():
            state.clear(index)
        assert state.cache.arena.extents.free_bytes == self.hub.arena.name.size, "slots leaked"

    # Which one, is drawn as a number: how many there are may depend on how fast the disk is, and draws must not.

    def an_engine(self, which: int) -> Engine:
        if not self.engines:
            self.join(which % 2)
        return self.engines[which % len(self.engines)]

    def a_worker(self, which: int) -> Process:
        engine = self.an_engine(which)
        return engine.workers[which // 7 % len(engine.workers)]

    def a_process(self, which: int) -> Process:
        engine = self.an_engine(which)
        return engine.processes[which // 7 % len(engine.processes)]

    def a_job(self, engine: Engine, which: int) -> Job | None:
        return engine.jobs[-1 - which // 50 % len(engine.jobs)] if engine.jobs else None

    @rule(model=st.integers(0, 1))
    @precondition(lambda self: len(self.engines) < 3)
    def join(self, model: int) -> None:
        self.n_engines += 1
        self.engines.append(Engine(self, self.n_engines, model))

    # Writing.

    @rule(which=WHICH, text=TEXT, exact=st.booleans(), start=st.sampled_from([0, 0, 20, 32]))
    def reserve(self, which: int, text: int, exact: bool, start: int) -> None:
        self.reserve_for(self.an_engine(which), TEXTS[text], exact, start)

    def reserve_for(
        self, engine: Engine, text: np.ndarray, exact: bool = True, start: int = 0, run: int | None = None
    ) -> Job | None:
        try:
            reserved = engine.scheduler.client.reserve(text, Span(start, len(text)), exact=exact, run=run)
        except BlendHubError:
            return None
        if reserved.right is None:
            return None
        engine.jobs.append(Job(reserved, text))
        return engine.jobs[-1]

    @rule(which=WHICH, text=TEXT, other=TEXT, last=st.booleans())
    def grow(self, which: int, text: int, other: int, last: bool) -> None:
        """Store the beginning of a text, and extend the run, perhaps with another text's tokens by mistake."""
        engine = self.an_engine(which)
        with contextlib.suppress(BlendHubError):
            first = engine.scheduler.client.reserve(TEXTS[text], Span(0, 40))
            if first.right is None:
                return
            self.write_all(engine, Job(first, TEXTS[text]), 0.5)
            second = engine.scheduler.client.reserve(
                TEXTS[other], Span(first.span.end, len(TEXTS[other])), run=first.run
            )
            if second.right and last:
                self.write_all(engine, Job(second, TEXTS[other]), 0.5)

    @rule(which=WHICH, text=TEXT)
    def store(self, which: int, text: int) -> None:
        self.store_by(self.an_engine(which), TEXTS[text])

    def store_by(self, engine: Engine, text: np.ndarray) -> None:
        job = self.reserve_for(engine, text)
        if job:
            self.write_all(engine, job, 0.5)

    @rule(which=WHICH, share=st.floats(0, 1))
    def write_what_was_planned(self, which: int, share: float) -> None:
        """Perhaps long after the reservation: after a restart of the hub, or in another session."""
        engine = self.an_engine(which)
        job = self.a_job(engine, which)
        if job:
            self.write_all(engine, job, share)

    def write_all(self, engine: Engine, job: Job, share: float) -> None:
        for worker in engine.workers:
            write = worker.begin(job)
            if write:
                write.write()
                worker.writes.remove(write)
                write.end()
        for position in (job.span.start + int(share * len(job.span)), job.span.end):
            for worker in engine.workers:
                # One that did not write has nothing to commit.
                if worker.client._rights._why_ended(job.right) == "":
                    worker.commit(job, position)

    @rule(which=WHICH)
    def begin_to_write(self, which: int) -> None:
        job = self.a_job(self.an_engine(which), which)
        if job:
            self.a_worker(which).begin(job)

    @rule(which=WHICH, commits=st.booleans())
    def write_on_and_end(self, which: int, commits: bool) -> None:
        worker = self.a_worker(which)
        if worker.writes:
            write = worker.writes.pop()
            write.write()
            write.end()
            if commits:
                worker.commit(write.job, write.job.span.end)

    @invariant()
    def those_who_may_write_do(self) -> None:
        """Writes that have begun are repeated after every step; they never change a chunk that can be read."""
        if not hasattr(self, "hub"):
            return
        for process in [*(worker for engine in self.engines for worker in engine.workers), *self.orphans]:
            for write in process.writes:
                self.check_that_slots_are_kept(write)
                write.write()

    def check_that_slots_are_kept(self, write: Write) -> None:
        right, state = write.job.right, self.hub.state
        if right.arena != self.hub.arena.name.nonce:
            return  # memory that no hub has any more
        lease = state.writes.leases._by_id.get(right.lease)
        held = {slot.slot for slot in lease.slots[lease.published :]} if lease else set()
        quarantine = state.writes.quarantined.get(right.lease)
        held |= set(quarantine.offsets) if quarantine else set()
        assert {slot.slot for slot in write.job.slots} <= held, "a slot that may be written is free, or readable"

    @rule(which=WHICH, by_worker=st.booleans())
    def abort(self, which: int, by_worker: bool) -> None:
        engine = self.an_engine(which)
        job = self.a_job(engine, which)
        if job:
            process = self.a_worker(which) if by_worker else engine.scheduler
            with contextlib.suppress(BlendHubError):
                process.client.abort(job.right)

    @rule(which=WHICH, text=TEXT, other=TEXT)
    def write_too_late(self, which: int, text: int, other: int) -> None:
        """A lease expires and other engines store, before its engine writes."""
        slow, quick = self.an_engine(which), self.an_engine(which // 3)
        job = self.reserve_for(slow, TEXTS[text])
        self.time_passes(LEASE_S + 1)
        for engine in (quick, slow):
            for process in engine.processes:
                process.keep_alive()
            late = self.reserve_for(engine, TEXTS[other])
            if late:
                self.write_all(engine, late, 0.5)
        if job:
            self.write_all(slow, job, 0.5)
        self.look_up_by(quick, TEXTS[other], 0.0, 0)

    @rule(which=WHICH, text=TEXT, other=TEXT, times=st.integers(0, 2))
    def a_write_is_overtaken(self, which: int, text: int, other: int, times: int) -> None:
        """A lease ends while a process writes under it."""
        slow, quick = self.an_engine(which), self.an_engine(which // 3)
        job = self.reserve_for(slow, TEXTS[text])
        if job:
            self.a_worker(which).begin(job)
        self.time_passes(LEASE_S + 1)
        for _ in range(times):
            for process in slow.processes:
                process.keep_alive()
        self.store_by(quick, TEXTS[other])

    @rule(
        which=WHICH,
        text=TEXT,
        other=TEXT,
        writes_before=st.booleans(),
        reserves_after=st.booleans(),
        aborts=st.booleans(),
        line=st.sampled_from([None, Line.GOOD, Line.REGISTRATIONS_ARE_LOST]),
    )
    def a_rank_is_cut_off(
        self,
        which: int,
        text: int,
        other: int,
        writes_before: bool,
        reserves_after: bool,
        aborts: bool,
        line: Line | None,
    ) -> None:
        """The hub ends a session; its client notices late or never, and may register anew while it writes."""
        engine, worker = self.an_engine(which), self.a_worker(which)
        job = self.reserve_for(engine, TEXTS[text])
        if job and writes_before:
            worker.begin(job)
        worker.line.cut()
        if reserves_after:
            job = self.reserve_for(engine, TEXTS[other]) or job
            if job:
                worker.begin(job)
        if job and aborts:
            with contextlib.suppress(BlendHubError):
                engine.scheduler.client.abort(job.right)
        if line:
            worker.line.line = line
            worker.keep_alive()
            worker.line.line = Line.GOOD
        if job:
            worker.begin(job)
        self.store_by(self.an_engine(which // 3), TEXTS[other])

    # Reading.

    @rule(which=WHICH, prompt=PROMPT, wait=st.sampled_from([0.0, 0.5]), skip=st.integers(0, 220))
    def look_up(self, which: int, prompt: int, wait: float, skip: int) -> None:
        self.look_up_by(self.an_engine(which), PROMPTS[prompt], wait, skip)

    def look_up_by(self, engine: Engine, prompt: np.ndarray, wait: float, skip: int) -> None:
        for worker in engine.workers:
            with contextlib.suppress(BlendHubError):
                found = worker.client.lookup(prompt, wait_s=wait, skip_prefix=skip)
                self.check_order(found, skip)
                with worker.client.reading(found) as pieces:
                    copies = [(piece, copied(worker, piece)) for piece in pieces]
                check(worker, copies, prompt)

    @rule(which=WHICH, prompt=PROMPT, seconds=st.sampled_from([0.0, 1.0]), skip=st.integers(0, 220))
    def look_up_and_acquire_later(self, which: int, prompt: int, seconds: float, skip: int) -> None:
        engine = self.an_engine(which)
        with contextlib.suppress(BlendHubError):
            named = engine.scheduler.client.lookup(PROMPTS[prompt], acquire=False)
            assert named.lease is None and not named.pieces
            self.time_passes(seconds)
            found = engine.workers[0].client.acquire(named.matches, skip)
            self.check_order(found, skip)
            if found.lease is not None:
                engine.reads.append((found, PROMPTS[prompt]))

    def check_order(self, found: wire.Found, skip: int) -> None:
        at = skip
        for piece in found.pieces:
            assert piece.span.start >= at and len(piece.span)
            at = piece.span.end

    @rule(which=WHICH)
    def read_and_release(self, which: int) -> None:
        engine = self.an_engine(which)
        if engine.reads:
            found, prompt = engine.reads.pop()
            worker = engine.workers[0]
            assert found.lease is not None
            with contextlib.suppress(BlendHubError):  # what was read must not be used then, so it may be anything
                copies = [(piece, copied(worker, piece)) for piece in found.pieces]
                worker.client.release(found.lease)
                check(worker, copies, prompt)

    @rule(which=WHICH, prompt=PROMPT)
    def prefetch(self, which: int, prompt: int) -> None:
        with contextlib.suppress(BlendHubError):
            self.an_engine(which).scheduler.client.prefetch(PROMPTS[prompt])

    # Trouble.

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

    @rule(which=WHICH)
    def keep_alive(self, which: int) -> None:
        self.a_process(which).keep_alive()

    @rule()
    def all_keep_alive(self) -> None:
        for engine in self.engines:
            for process in engine.processes:
                process.keep_alive()

    @rule(which=WHICH, child_lives=st.booleans())
    def crash(self, which: int, child_lives: bool) -> None:
        self.kill(self.an_engine(which), child_lives)

    def kill(self, engine: Engine, child_lives: bool = False) -> None:
        self.engines.remove(engine)
        for process in engine.processes:
            dead = process.line.process
            process.line.line = Line.CUT
            if child_lives:
                self.orphans.append(process)
            else:
                process.exit()
            self.hub.state.process_died(dead)

    @rule()
    def children_exit(self) -> None:
        for orphan in self.orphans:
            orphan.exit()
        self.orphans.clear()

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
        self.hub.settle()
        self.hub.stop()
        self.hub.start()
        self.hub.service._watch.watch = lambda process: None
        if orderly:
            self.all_keep_alive()

    @rule(which=WHICH)
    def clear(self, which: int) -> None:
        with contextlib.suppress(BlendHubError):
            self.an_engine(which).scheduler.client.clear()

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, LEASE_S + 1, LEASE_S + 1, SILENCE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.hub.now += seconds
        self.hub.service.tick()

    @rule()
    def the_store_catches_up(self) -> None:
        self.hub.settle()

    @rule(garbage=st.integers(0, 2**62))
    def nonsense(self, garbage: int) -> None:
        for engine in self.engines[:1]:
            client = engine.workers[0].client
            nothing = [Match(Span(0, 8), garbage, 0, True)]
            with contextlib.suppress(BlendHubError):
                assert not client.acquire(nothing).pieces
            for ask in (client.release, client.fetch):
                with pytest.raises(BlendHubError):
                    ask(garbage)

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "hub"):
            self.hub.state.check_integrity()


def copied(worker: Process, piece: wire.Piece) -> np.ndarray:
    return worker.client.shard(piece.slot).copy()


def check(worker: Process, copies: list[tuple[wire.Piece, np.ndarray]], prompt: np.ndarray) -> None:
    """Every piece holds the bytes that were written for these tokens at the positions it names."""
    for piece, shard in copies:
        rows = shard.view(np.uint32)[piece.slot_token : piece.slot_token + len(piece.span)]
        expected = prompt[piece.span.start : piece.span.end] ^ np.uint32(worker.rank + 1)
        assert np.array_equal(rows, expected), "a piece holds other tokens' KV"


TestAnyHistory = HubMachine.TestCase
TestAnyHistory.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyHistory.pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
