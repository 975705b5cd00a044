"""Engines of the state machine: clients that tests may stop, cut off and kill, on lines that lose messages."""

import contextlib
import itertools
import tempfile
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from blendhub_transports.pending import PendingRequest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.client.session import Reservation
from blendhub.contracts import Envelope, RunKey
from blendhub.contracts.transport import Connection, Pending
from blendhub.core.errors import BlendHubError, DeadlineExceeded, LeaseError, PeerGone
from blendhub.core.layout import Variant
from blendhub.core.tokens import Tokens
from blendhub.system.processes import ProcessId
from tests.hub.hub_direct import BASE, STATE_ROWS, DirectHub, namespace, tokens

SILENCE_S = 25.0
HARDLY_S = 0.005
"""The timeout of clients, and so how long they wait for writes that do not end."""

MODELS = [
    *(namespace("a"), namespace("b", world_size=2), namespace("c", world_size=2, copies=2)),
    namespace("d", world_size=2, state_layouts=(STATE_ROWS,), moves_states=True),
]
MAP_BYTES = 99
SALT = "salt"
SALTED = Variant(cache_salt=SALT)
VARIANTS = [BASE, SALTED, Variant(lora="adapter")]
TEXTS = [tokens(seed, length) for seed, length in enumerate((40, 64, 96, 150, 200))]
PROMPTS = [*TEXTS, np.concatenate([TEXTS[3][20:120], TEXTS[1]]), np.concatenate([tokens(99, 17), TEXTS[4]])]

WHICH = st.integers(0, 999)
TEXT = st.integers(0, len(TEXTS) - 1)
PROMPT = st.integers(0, len(PROMPTS) - 1)
VARIANT = st.sampled_from([BASE, *VARIANTS])


class Line(Enum):
    """What happens to a client's requests and their replies."""

    GOOD = 0
    REPLIES_ARE_LOST = 1
    """The hub executes requests, but the client does not receive the replies."""
    CUT = 2
    REGISTRATIONS_ARE_LOST = 3
    """Only the replies to registrations are lost."""


def answered(outcome: Envelope | BlendHubError) -> Pending:
    pending = PendingRequest(0, "the hub", 60.0)
    pending.settle(outcome)
    return pending


class DirectConnection(Connection):
    """The connection of one client, which claims to be a process that the test may kill."""

    _numbers = itertools.count(1)

    def __init__(self, hub: DirectHub, process: ProcessId) -> None:
        self.hub = hub
        self.process = process
        self.line = Line.GOOD
        self.peer = b"client-%d" % next(self._numbers)
        self._codec = wire.client_codec()

    def create(self, *transport: Any) -> Any:
        """The client's host makes this transport."""
        return self

    def connect(self, *endpoint: Any) -> Connection:
        return self

    def submit(self, request: Envelope, timeout: float) -> Pending:
        message: Any = request.message
        if self.line is Line.CUT:
            return answered(PeerGone("the line is cut"))
        registers = isinstance(message, wire.Register)
        if registers:
            message = msgspec.structs.replace(message, process=self.process)
        outcome: Envelope | BlendHubError
        try:
            answer = self.hub.envelope(message, request.payload, self.peer)
            outcome = Envelope(self._codec.decode(self.hub.service.codec.encode(answer.message)), answer.payload)
        except BlendHubError as error:
            outcome = error
        if self.line is Line.REPLIES_ARE_LOST or (self.line is Line.REGISTRATIONS_ARE_LOST and registers):
            return answered(DeadlineExceeded("the reply is lost"))
        return answered(outcome)

    def cut(self) -> None:
        """The hub sees the end of the connection; the next connection is a new peer."""
        self.hub.service.gone(self.peer)
        self.peer = b"client-%d" % next(self._numbers)

    def close(self) -> None:
        if self.line is not Line.CUT:
            self.cut()


class Job:
    """A text that an engine stores, with its write lease."""

    def __init__(self, reserved: Reservation, text: np.ndarray, variant: Variant) -> None:
        assert reserved.right
        self.right, self.slots, self.span = reserved.right, reserved.slots, reserved.span
        self.provenance = reserved.provenance
        self.text, self.variant = text, variant


class Read(NamedTuple):
    """A lease on what was found of a prompt."""

    found: wire.Found
    prompt: np.ndarray
    variant: Variant


def map_bytes(text: np.ndarray, mark: np.uint32) -> np.ndarray:
    """The bytes that stand for the map of a segment."""
    return np.resize((text ^ mark).view(np.uint8), MAP_BYTES)


class Write:
    """A write that has begun with a valid right; the bytes follow later, through the mapping of that moment."""

    def __init__(self, process: "Process", job: Job) -> None:
        self.job = job
        self.mark = process.mark(job.variant)
        self._end = ExitStack()
        self._end.enter_context(process.client.writing(job.right))
        client = process.client
        self._slots = [slot for slot in job.slots if client.namespace.writes(process.rank, slot.span)]
        self._shards = [client.shard(slot.slot) for slot in self._slots]
        self._map = process.map_in(job.slots[-1].slot) if job.provenance.map else None

    def write(self) -> None:
        for slot, shard in zip(self._slots, self._shards, strict=True):
            shard[: 4 * len(slot.span)] = (self.job.text[slot.span.start : slot.span.end] ^ self.mark).view(np.uint8)
            shard[4 * len(slot.span) :] = 0xEE
        if self._map is not None:
            self._map[:] = map_bytes(self.job.text[self.job.span.start : self.job.span.end], self.mark)

    def end(self) -> None:
        self._shards.clear()
        self._map = None
        self._end.close()


class Process:
    """A client in a process that the test may stop, cut off and kill."""

    def __init__(self, machine: "HubRules", engine: str, model: int, rank: int) -> None:
        self.model, self.rank = model, rank
        # Pids beyond those that the kernel gives.
        machine.started += 1
        process = ProcessId(ProcessId.mine().host, 2**23 + machine.started, rank + 1)
        self.line = DirectConnection(machine.hub, process)
        host: Any = self.line
        self.client = HubClient("", host=host, timeout=HARDLY_S, background=False)
        self.client.register(engine, MODELS[model], rank)
        self.writes: list[Write] = []

    def mark(self, variant: Variant) -> np.uint32:
        """What the bytes of this rank's shards depend on besides the tokens."""
        shard = self.rank // MODELS[self.model].copies
        return np.uint32(1 + shard + 4 * self.model + 16 * VARIANTS.index(variant))

    def map_in(self, slot: int) -> np.ndarray:
        """This rank's map in a slot, in place."""
        return self.client.map_of(slot, MAP_BYTES)

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
            self.client.commit(job.right, upto).result()

    def exit(self) -> None:
        """The kernel removes the mapping."""
        while self.writes:
            self.writes.pop().end()
        self.client.arena = None

    def keep_alive(self) -> None:
        with contextlib.suppress(BlendHubError):
            self.client.keep_alive()


class Engine:
    """A scheduler, which reserves and looks up, and workers, which write and read."""

    def __init__(self, machine: "HubRules", number: int, model: int) -> None:
        self.scheduler = Process(machine, f"engine-{number}", model, -1)
        self.workers = [Process(machine, f"engine-{number}", model, n) for n in range(MODELS[model].world_size)]
        self.processes = [self.scheduler, *self.workers]
        self.jobs: list[Job] = []
        self.reads: list[Read] = []


class HubRules(RuleBasedStateMachine):
    """A hub with engines, whose rules are in subclasses."""

    @initialize(stored=st.booleans(), n_slots=st.integers(8, 48))
    def start(self, stored: bool, n_slots: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.hub = DirectHub(n_slots, Path(self.folder.name) / "store" if stored else None, silence_s=SILENCE_S)
        self.hub.service._watch.watch = lambda process: None  # the processes are made up
        self.engines: list[Engine] = []
        self.orphans: list[Process] = []
        """Dead processes whose forked children still have their mappings."""
        self.texts: dict[RunKey, Tokens] = {}
        """What was to be stored in each run."""
        self.started = self.n_engines = 0
        for model in range(len(MODELS)):
            self.join(model)

    # Which one, is drawn as a number: how many there are may depend on how fast the disk is, and draws must not.

    def an_engine(self, which: int) -> Engine:
        if not self.engines:
            self.join(which % len(MODELS))
        return self.engines[which % len(self.engines)]

    def a_worker(self, which: int) -> Process:
        workers = self.an_engine(which).workers
        return workers[which // 7 % len(workers)]

    def a_process(self, which: int) -> Process:
        processes = self.an_engine(which).processes
        return processes[which // 7 % len(processes)]

    def an_engine_with_segments(self, which: int) -> Engine:
        engines = [engine for engine in self.engines if engine.scheduler.client.namespace.moves_states]
        if not engines:
            self.join(len(MODELS) - 1)
        return engines[which % len(engines)] if engines else self.engines[-1]

    def a_job(self, engine: Engine, which: int) -> Job | None:
        return engine.jobs[-1 - which // 50 % len(engine.jobs)] if engine.jobs else None

    @rule(model=st.integers(0, len(MODELS) - 1))
    @precondition(lambda self: len(self.engines) <= len(MODELS))
    def join(self, model: int) -> None:
        self.n_engines += 1
        self.engines.append(Engine(self, self.n_engines, model))

    def note(self, reserved: Reservation, text: Tokens) -> None:
        """Note whose tokens a reservation is for."""
        assert reserved.right
        lease = self.hub.state.writes.leases.get(reserved.right.lease)
        if lease:  # else the session has ended already
            self.texts[lease.run.key] = text[: reserved.span.end]

    def kill(self, engine: Engine, child_lives: bool = False) -> None:
        self.engines.remove(engine)
        for process in engine.processes:
            process.line.line = Line.CUT
            if child_lives:
                self.orphans.append(process)
            else:
                process.exit()
            self.hub.state.process_died(process.line.process)

    def children_exit(self) -> None:
        while self.orphans:
            self.orphans.pop().exit()
