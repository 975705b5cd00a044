"""Rules by which engines of the state machine write: in time, too late, and while they are cut off."""

import contextlib

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from blendhub.core.errors import BlendHubError
from blendhub.core.layout import Variant
from blendhub.core.provenance import EXACT, Provenance, StateMap
from blendhub.core.spans import NOWHERE, Span
from tests.hub.hub_direct import BASE
from tests.hub.machine_engines import MAP_BYTES, TEXT, TEXTS, VARIANT, WHICH, Engine, HubRules, Job, Line, Write

PROVENANCES = [
    *(Provenance(donates_from=position) for position in (0, 32, 96, NOWHERE)),
    *(Provenance("after_blended", ratio, position) for ratio, position in ((0.0, 0), (0.5, 32), (0.5, NOWHERE))),
    Provenance("blended", 0.25),
]
PROVENANCE = st.sampled_from(PROVENANCES)
DOES = st.sets(st.sampled_from(["writes before", "reserves after", "aborts"]))
LINE = st.sampled_from([None, Line.GOOD, Line.REGISTRATIONS_ARE_LOST])


class WritingRules(HubRules):
    @rule(which=WHICH, text=TEXT, variant=VARIANT, provenance=PROVENANCE, start=st.sampled_from([0, 0, 20, 32]))
    def reserve(self, which: int, text: int, variant: Variant, provenance: Provenance, start: int) -> None:
        self.reserve_for(self.an_engine(which), TEXTS[text], variant, start, provenance)

    def reserve_for(
        self, engine: Engine, text: np.ndarray, variant: Variant = BASE, start: int = 0, provenance: Provenance = EXACT
    ) -> Job | None:
        try:
            reserved = engine.scheduler.client.reserve(text, Span(start, len(text)), variant, provenance).result()
        except BlendHubError:
            return None
        if reserved.right is None:
            return None
        self.note(reserved, text)
        engine.jobs.append(Job(reserved, text, variant))
        return engine.jobs[-1]

    @rule(which=WHICH, text=TEXT, other=TEXT, variant=VARIANT, another=VARIANT, last=st.booleans())
    def grow(self, which: int, text: int, other: int, variant: Variant, another: Variant, last: bool) -> None:
        """Store the beginning of a text, and extend the run, perhaps with another text's tokens by mistake, or in
        another namespace."""
        engine = self.an_engine(which)
        with contextlib.suppress(BlendHubError):
            first = engine.scheduler.client.reserve(TEXTS[text], Span(0, 40), variant).result()
            if first.right is None:
                return
            self.note(first, TEXTS[text])
            self.write_all(engine, Job(first, TEXTS[text], variant), 0.5)
            second = engine.scheduler.client.reserve(
                TEXTS[other], Span(first.span.end, len(TEXTS[other])), another, run=first.run
            ).result()
            if second.right:
                self.note(second, TEXTS[other])
            if second.right and last:
                self.write_all(engine, Job(second, TEXTS[other], another), 0.5)

    @rule(which=WHICH, text=TEXT, variant=VARIANT)
    def store(self, which: int, text: int, variant: Variant) -> None:
        self.store_by(self.an_engine(which), TEXTS[text], variant)

    @rule(
        which=WHICH,
        text=TEXT,
        variant=VARIANT,
        start=st.integers(0, 60),
        length=st.integers(1, 120),
        whole=st.booleans(),
    )
    def store_segment(self, which: int, text: int, variant: Variant, start: int, length: int, whole: bool) -> None:
        engine, tokens = self.an_engine_with_segments(which), TEXTS[text][: start + length]
        if start < len(tokens):
            provenance = Provenance(map=StateMap(Span(start, len(tokens)), MAP_BYTES))
            job = self.reserve_for(engine, tokens, variant, start, provenance)
            if job and whole:
                self.write_all(engine, job, 0.5)

    def store_by(self, engine: Engine, text: np.ndarray, variant: Variant = BASE) -> None:
        job = self.reserve_for(engine, text, variant)
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
                if worker.client._rights._reason_ended(job.right) == "":
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
        held |= {offset for offset, _ in quarantine.slots} if quarantine else set()
        assert {slot.slot for slot in write.job.slots} <= held, "a slot that may be written is free, or readable"

    @rule(which=WHICH, by_worker=st.booleans())
    def abort(self, which: int, by_worker: bool) -> None:
        engine = self.an_engine(which)
        job = self.a_job(engine, which)
        if job:
            process = self.a_worker(which) if by_worker else engine.scheduler
            with contextlib.suppress(BlendHubError):
                process.client.abort(job.right)

    @rule(which=WHICH, text=TEXT, other=TEXT, does=DOES, line=LINE)
    def a_rank_is_cut_off(self, which: int, text: int, other: int, does: set[str], line: Line | None) -> None:
        """The hub ends a session; its client notices late or never, and may register anew while it writes."""
        engine, worker = self.an_engine(which), self.a_worker(which)
        job = self.reserve_for(engine, TEXTS[text])
        if job and "writes before" in does:
            worker.begin(job)
        worker.line.cut()
        if "reserves after" in does:
            job = self.reserve_for(engine, TEXTS[other]) or job
            if job:
                worker.begin(job)
        if job and "aborts" in does:
            with contextlib.suppress(BlendHubError):
                engine.scheduler.client.abort(job.right)
        if line:
            worker.line.line = line
            worker.keep_alive()
            worker.line.line = Line.GOOD
        if job:
            worker.begin(job)
        self.store_by(self.an_engine(which // 3), TEXTS[other])
