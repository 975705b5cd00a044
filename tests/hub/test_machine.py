"""Any history of sessions that store, look up, read, crash, expire and evict, beside a model that knows the tokens."""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hub_direct import DirectHub, Member, namespace, tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blendhub import wire
from blendhub.config import HubConfig
from blendhub.errors import ArenaFull, BlendHubError, InvalidInput, LeaseError, UnknownSession
from blendhub.plan import Span
from blendhub.processes import ProcessId

LEASE_S, SILENCE_S = 10.0, 25.0
MODELS = [namespace("a"), namespace("b", world_size=2)]
TEXTS = [tokens(seed, length) for seed, length in enumerate((40, 64, 96, 150, 200))]
PROMPTS = [*TEXTS, np.concatenate([TEXTS[3][20:120], TEXTS[1]]), np.concatenate([tokens(99, 17), TEXTS[4]])]


class Engine:
    """All ranks of one engine, each in a process of its own that the test may kill."""

    def __init__(self, hub: DirectHub, number: int, model: int) -> None:
        here = ProcessId.mine().host
        self.hub = hub
        self.members: list[Member] = []
        for rank in range(MODELS[model].world_size):
            # Pids beyond what the kernel gives: on this machine, so the hub must fear their writes.
            process = ProcessId(here, 2**23 + number, rank)
            self.members.append(Member(hub, f"engine-{number}", rank, MODELS[model], process))
        self.reads: list[tuple[wire.Found, np.ndarray]] = []
        self.writes: list[tuple[wire.Reserved, np.ndarray]] = []
        self.ahead: set[tuple[int | None, int]] = set()
        """Ranks that have committed the whole of a lease while others have not."""
        self.scribbles: list[tuple[wire.Reserved, np.ndarray]] = []
        """Writes that the hub took back, but this engine does not know yet: it goes on writing."""

    def is_forgotten(self) -> bool:
        known = self.hub.core.sessions._by_id
        return any(member.registered.session not in known for member in self.members)

    def come_back(self) -> None:
        """What a client does when the hub does not know its session any more."""
        for member in self.members:
            before = member.registered.session
            if before in self.hub.core.sessions._by_id:
                member.ask(wire.Unregister)
            member.join(replaces=before)
        self.reads, self.writes, self.scribbles = [], [], []


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
        self.started = 0
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
        for engine in list(self.engines):
            self.kill(engine)
        self.hub.settle()
        self.hub.core.check_integrity()
        core = self.hub.core
        assert len(core.sessions) == len(core.reads.leases) == len(core.writes.leases) == 0
        assert not core.writes.quarantined and not core.lingering
        for space in core.spaces.values():
            core.clear(space)
        assert core.cache.arena.extents.free == self.hub.arena.name.size, "slots leaked"

    @rule(model=st.integers(0, 1))
    @precondition(lambda self: len(self.engines) < 3)
    def join(self, model: int) -> None:
        self.started += 1
        self.engines.append(Engine(self.hub, self.started, model))

    def any_engine(self, data: st.DataObject) -> Engine:
        if not self.engines:
            self.join(data.draw(st.integers(0, 1)))
        engine = data.draw(st.sampled_from(self.engines))
        # Drawn in any case: whether it was forgotten may depend on how fast the disk is, and draws must not.
        if data.draw(st.booleans()) and engine.is_forgotten():
            engine.come_back()
        return engine

    @rule(data=st.data(), text=st.sampled_from(TEXTS), exact=st.booleans(), start=st.sampled_from([0, 0, 20, 32]))
    def reserve(self, data: st.DataObject, text: np.ndarray, exact: bool, start: int) -> None:
        self.reserve_for(self.any_engine(data), text, exact, start)

    def reserve_for(self, engine: Engine, text: np.ndarray, exact: bool, start: int) -> None:
        try:
            reserved = engine.members[0].reserve(text, Span(start, len(text)), exact=exact)
        except (ArenaFull, UnknownSession):
            return
        if reserved.lease is not None:
            engine.writes.append((reserved, text))

    @rule(data=st.data(), text=st.sampled_from(TEXTS), other=st.sampled_from(TEXTS), last=st.booleans())
    def grow(self, data: st.DataObject, text: np.ndarray, other: np.ndarray, last: bool) -> None:
        """Store a beginning, and go on with it; by mistake with another text's tokens, perhaps."""
        engine = self.any_engine(data)
        try:
            first = engine.members[0].reserve(text, Span(0, 40))
            if first.lease is None:
                return
            engine.writes.insert(0, (first, text))
            self.write_all(engine, 0.5)
            second = engine.members[0].reserve(other, Span(first.span.end, len(other)), run=first.run)
        except (ArenaFull, UnknownSession, InvalidInput):  # a text that has no more than was stored
            return
        if second.lease is not None:
            engine.writes.insert(0, (second, other))
            if last:
                self.write_all(engine, 0.5)

    @rule(data=st.data(), prompt=st.sampled_from(PROMPTS))
    def prefetch(self, data: st.DataObject, prompt: np.ndarray) -> None:
        with contextlib.suppress(UnknownSession):
            self.any_engine(data).members[0].ask(wire.Prefetch, [prompt.tobytes()])

    @rule(
        data=st.data(), prompt=st.sampled_from(PROMPTS), seconds=st.sampled_from([0.0, 1.0]), skip=st.integers(0, 220)
    )
    def look_up_and_acquire_later(self, data: st.DataObject, prompt: np.ndarray, seconds: float, skip: int) -> None:
        engine = self.any_engine(data)
        try:
            named = engine.members[0].lookup(prompt, acquire=False)
            assert named.lease is None and not named.pieces
            self.time_passes(seconds)
            found = engine.members[0].ask(wire.Acquire, matches=named.matches, skip_prefix_n_tokens=skip)
        except UnknownSession:
            return
        self.took(engine, found, prompt, skip)

    @rule(data=st.data(), prompt=st.sampled_from(PROMPTS))
    def look_up_all(self, data: st.DataObject, prompt: np.ndarray) -> None:
        self.look_up(data, prompt, 0.5, 0)

    @rule(data=st.data(), text=st.sampled_from(TEXTS))
    def store_and_look_up(self, data: st.DataObject, text: np.ndarray) -> None:
        self.store(data, text)
        self.look_up(data, text, 0.0, 0)

    @rule(data=st.data(), text=st.sampled_from(TEXTS))
    def store(self, data: st.DataObject, text: np.ndarray) -> None:
        self.reserve(data, text, True, 0)
        self.write_and_commit(data, 0.5)

    @rule(data=st.data(), share=st.floats(0, 1))
    def write_and_commit(self, data: st.DataObject, share: float) -> None:
        self.write_all(self.any_engine(data), share)

    def write_all(self, engine: Engine, share: float) -> None:
        if engine.writes:
            reserved, text = engine.writes.pop(0)
            for member in engine.members:
                member.write(reserved, text)
            upto = reserved.span.start + int(share * len(reserved.span))
            try:
                for position in (upto, reserved.span.end):
                    for member in engine.members:
                        if (reserved.lease, member.rank) not in engine.ahead:
                            member.commit(reserved, position)
            except (LeaseError, UnknownSession):
                engine.scribbles.append((reserved, text))
                self.scribble(engine)

    @rule(data=st.data())
    def commit_by_one_rank(self, data: st.DataObject) -> None:
        engine = self.any_engine(data)
        if len(engine.members) > 1 and engine.writes:
            reserved, text = engine.writes[0]
            engine.members[1].write(reserved, text)
            try:
                engine.members[1].commit(reserved)
                engine.ahead.add((reserved.lease, 1))
            except (LeaseError, UnknownSession):
                engine.scribbles.append(engine.writes.pop(0))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        engine = self.any_engine(data)
        if engine.writes:
            reserved, text = engine.writes.pop()
            try:
                engine.members[0].ask(wire.Abort, lease=reserved.lease)
            except UnknownSession:
                pass
            except LeaseError:
                engine.scribbles.append((reserved, text))

    @rule(data=st.data(), prompt=st.sampled_from(PROMPTS), wait=st.sampled_from([0.0, 0.5]), skip=st.integers(0, 220))
    def look_up(self, data: st.DataObject, prompt: np.ndarray, wait: float, skip: int) -> None:
        self.look_up_by(self.any_engine(data), prompt, wait, skip)

    def look_up_by(self, engine: Engine, prompt: np.ndarray, wait: float, skip: int) -> None:
        try:
            found = engine.members[0].lookup(prompt, wait_s=wait, skip_prefix_n_tokens=skip)
        except UnknownSession:
            return
        self.took(engine, found, prompt, skip)

    def took(self, engine: Engine, found: wire.Found, prompt: np.ndarray, skip: int) -> None:
        at = skip
        for piece in found.pieces:
            assert piece.span.start >= at and len(piece.span)
            at = piece.span.end
        for member in engine.members:
            member.check(found, prompt)
        if found.lease is not None:
            engine.reads.append((found, prompt))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        engine = self.any_engine(data)
        if engine.reads:
            found, prompt = engine.reads.pop()
            for member in engine.members:
                copies = [member.shard(piece.slot).copy() for piece in found.pieces]
            try:
                engine.members[0].ask(wire.Release, lease=found.lease)
            except (LeaseError, UnknownSession):
                return  # what was read must not be used, so it may be anything
            for copied, piece in zip(copies, found.pieces, strict=True):
                rows = copied.view(np.uint32)[piece.slot_token : piece.slot_token + len(piece.span)]
                rank = len(engine.members)
                assert np.array_equal(rows, prompt[piece.span.start : piece.span.end] ^ np.uint32(rank))

    @rule(data=st.data(), text=st.sampled_from(TEXTS), other=st.sampled_from(TEXTS))
    def write_too_late(self, data: st.DataObject, text: np.ndarray, other: np.ndarray) -> None:
        """A lease runs out, others store, and the writer who knows nothing of it goes on."""
        slow, quick = self.engines[0] if self.engines else self.any_engine(data), self.any_engine(data)
        self.reserve_for(slow, text, True, 0)
        self.hub.now += LEASE_S + 1
        self.hub.service.tick()
        for engine in (quick, slow):
            self.reserve_for(engine, other, True, 0)
            self.write_all(engine, 0.5)
        self.look_up_by(quick, other, 0.0, 0)

    @rule(data=st.data())
    def scribble_late(self, data: st.DataObject) -> None:
        self.scribble(self.any_engine(data))

    def scribble(self, engine: Engine) -> None:
        """A slow writer writes what it does not know to be taken back; no other chunk may stand there yet."""
        for reserved, text in engine.scribbles:
            for member in engine.members:
                member.write(reserved, text)
                for slot in reserved.slots:
                    member.shard(slot.slot)[4 * len(slot.span) :] = 0xEE

    @rule(data=st.data())
    def ping(self, data: st.DataObject) -> None:
        engine = self.any_engine(data)
        for member in engine.members:
            try:
                revoked = member.ask(wire.Ping).revoked
                member.ask(wire.Ping, let_go=revoked)
            except UnknownSession:
                return
            engine.writes = [one for one in engine.writes if one[0].lease not in revoked]
            engine.scribbles = [one for one in engine.scribbles if one[0].lease not in revoked]

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        engine = self.any_engine(data)
        self.kill(engine)

    def kill(self, engine: Engine) -> None:
        self.engines.remove(engine)
        for member in engine.members:
            self.hub.core.died(member.process)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        engine = self.any_engine(data)
        for member in engine.members:
            try:
                member.ask(wire.Unregister)
            except UnknownSession:
                self.hub.core.died(member.process)
        self.engines.remove(engine)

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        engine = self.any_engine(data)
        try:
            engine.members[0].ask(wire.Clear)
        except UnknownSession:
            return

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
            for kind in (wire.Release, wire.Abort, wire.Fetch):
                with pytest.raises(BlendHubError):
                    engine.members[0].ask(kind, lease=garbage)

    @invariant()
    def all_agree(self) -> None:
        if hasattr(self, "hub"):
            self.hub.core.check_integrity()


TestAnyHistory = HubMachine.TestCase
TestAnyHistory.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
