"""The hub as a Python object, over any transport.

A client is one session of one engine. A thread of the client pings the hub; when the hub does not answer, or does not
know the session any more, that thread asks again and again, and registers anew. Meanwhile every call fails at once.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub import wire
from blendhub.arena_view import ArenaView
from blendhub.contracts import Envelope
from blendhub.contracts.transport import Buffer, Pending
from blendhub.errors import (
    BlendHubError,
    DeadlineExceeded,
    HubError,
    PeerGone,
    ProtocolError,
    StaleEpoch,
    UnknownSession,
)
from blendhub.host import PluginHost
from blendhub.layout import Namespace
from blendhub.plan import Match, Span
from blendhub.processes import ProcessId
from blendhub.tokens import TokenBuffer, as_tokens
from blendhub.write_rights import WriteRight, WriteRights

log = logging.getLogger(__name__)
R = TypeVar("R")
TIMEOUT_S = 5.0
REGISTER_TIMEOUT_S = 60.0
"""A hub that meets a namespace for the first time may have to compile its matchers."""

RETRY_S = 0.1
LEAVE_TIMEOUT_S = 1.0
"""The hub finds out in any case that a client has left."""

Bytes = npt.NDArray[np.uint8]


class Reservation(msgspec.Struct, frozen=True):
    """Slots for ``span``, which may be shorter at its beginning than asked; no right where nothing is to be written."""

    span: Span
    run: int | None
    right: WriteRight | None
    slots: tuple[wire.Slot, ...]


class PendingReply(Generic[R]):
    """A request under way."""

    def __init__(self, client: "HubClient", session: int | None, pending: Pending, expected: type[R]) -> None:
        self._client = client
        self._session = session
        self._pending = pending
        self._expected = expected

    def done(self) -> bool:
        """Whether ``result`` returns at once; true at the latest when the timeout has passed. Never blocks."""
        return self._pending.done()

    def result(self) -> R:
        """The answer; raises the error that came instead. Waits until the timeout, unless ``done``."""
        return self._checked().message  # type: ignore[return-value]

    def payload(self) -> Sequence[Buffer]:
        """The bytes that came with the answer; waits and raises as ``result`` does."""
        return self._checked().payload

    def _checked(self) -> Envelope:
        with self._client._noticing_trouble(self._session):
            answer = self._pending.result()
        if not isinstance(answer.message, self._expected):
            raise ProtocolError(
                f"the hub answered {type(answer.message).__name__} where {self._expected.__name__} was expected"
            )
        return answer


class HubClient:
    """One session. All methods may be called from several threads; every one ends by its timeout.

    Errors are those of ``blendhub.errors``. After ``UnknownSession``, ``StaleEpoch``, ``PeerGone`` or
    ``DeadlineExceeded`` the client is not ``is_up``: calls raise PeerGone at once until its own thread has reached the
    hub, and registered anew if need be. Leases from before a registration have ended; ``epoch`` tells the lives of
    the hub apart.
    """

    def __init__(
        self,
        endpoint: str,
        transport: str = "zmq",
        options: dict[str, Any] | None = None,
        *,
        host: PluginHost | None = None,
        timeout: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        background: bool = True,
    ) -> None:
        """``background`` false: the caller calls ``keep_alive`` regularly, instead of a thread of the client."""
        self._connection = (
            (host or PluginHost.discover())
            .create("transport", transport, options)
            .connect(endpoint, wire.client_codec())
        )
        self._timeout = timeout
        self._clock = clock
        self._background = background
        self._id = secrets.randbits(62)
        self._register: wire.Register | None = None
        self._registered: wire.Registered | None = None
        self._rights = WriteRights(clock)
        self._closed = threading.Event()
        self._down = threading.Event()
        """The hub does not answer, or does not know this session: requests fail at once instead of waiting in vain."""
        self._is_lost = False
        """The hub does not know this session any more."""
        self._keeper = threading.Thread(target=self._keep_alive_regularly, name="blendhub-ping", daemon=True)
        self.arena: ArenaView | None = None
        """The hub's arena, mapped; None if the hub is on another machine."""
        self.arena_trouble = ""
        """Why the arena could not be mapped, the last time that it was tried."""
        self.registrations = 0

    # Sessions.

    def register(self, engine: str, namespace: Namespace, rank: int = -1) -> None:
        """Join an engine. ``rank`` is -1 for a process that reads and writes no KV itself."""
        if self._register is not None:
            raise HubError("this client is registered already; a client is one session")
        self._register = wire.Register(
            engine=engine, rank=rank, process=ProcessId.mine(), namespace=namespace, client=self._id
        )
        try:
            self._join()
        except BaseException:
            self._register = self._registered = None
            raise
        self._down.clear()
        if self._background:
            self._keeper.start()

    @property
    def is_up(self) -> bool:
        """Whether the hub answered when it was last asked, and knows this session."""
        return not self._down.is_set()

    @property
    def epoch(self) -> int:
        """Which life of the hub this session belongs to."""
        return self._session.epoch

    @property
    def namespace(self) -> Namespace:
        if self._register is None:
            raise HubError("this client is not registered; call register first")
        return self._register.namespace

    def close(self) -> None:
        """Leave the hub; what this session holds ends. Closing twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._rights.close()
        # If a write goes on, the hub waits for the end of this process's mapping instead.
        if self._registered and self.is_up and self._rights.wait_until_idle(self._timeout):
            with contextlib.suppress(BlendHubError):
                leaving = wire.Unregister(**self._ids())
                self._submit(wire.Done, leaving, timeout=min(self._timeout, LEAVE_TIMEOUT_S)).result()
        self._down.set()
        self._connection.close()
        if self._keeper.is_alive():
            self._keeper.join(self._timeout)

    def __enter__(self) -> "HubClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Reading.

    def lookup(
        self, tokens: TokenBuffer, *, acquire: bool = True, skip_prefix: int = 0, wait_s: float = 0.0
    ) -> wire.Found:
        """What of these tokens is stored, with a read lease on what is ready, unless ``acquire`` is false."""
        return self.submit_lookup(tokens, acquire=acquire, skip_prefix=skip_prefix, wait_s=wait_s).result()

    def submit_lookup(
        self,
        tokens: TokenBuffer,
        *,
        acquire: bool = True,
        skip_prefix: int = 0,
        wait_s: float = 0.0,
        timeout: float | None = None,
    ) -> PendingReply[wire.Found]:
        """The same without waiting for the answer."""
        message = wire.Lookup(**self._ids(), acquire=acquire, skip_prefix_n_tokens=skip_prefix, wait_s=wait_s)
        timeout = self._timeout + wait_s if timeout is None else timeout
        return self._submit(wire.Found, message, [as_tokens(tokens).data], timeout)

    def prefetch(self, tokens: TokenBuffer) -> wire.Found:
        """Bring what is stored of these tokens into the arena, without waiting for it."""
        return self._call(wire.Found, wire.Prefetch(**self._ids()), [as_tokens(tokens).data])

    def acquire(self, matches: Sequence[Match], skip_prefix: int = 0) -> wire.Found:
        """A read lease on matches that a lookup named; those that are gone meanwhile are left out."""
        return self.submit_acquire(matches, skip_prefix).result()

    def submit_acquire(
        self, matches: Sequence[Match], skip_prefix: int = 0, *, timeout: float | None = None
    ) -> PendingReply[wire.Found]:
        """The same without waiting for the answer."""
        message = wire.Acquire(**self._ids(), matches=tuple(matches), skip_prefix_n_tokens=skip_prefix)
        return self._submit(wire.Found, message, (), timeout)

    def release(self, lease: int) -> None:
        """End a read lease. Raises LeaseError if it had ended before: then what was read must not be used."""
        self.submit_release(lease).result()

    def submit_release(self, lease: int, *, timeout: float | None = None) -> PendingReply[wire.Done]:
        """The same without waiting for the answer."""
        return self._submit(wire.Done, wire.Release(**self._ids(), lease=lease), (), timeout)

    @contextlib.contextmanager
    def reading(self, found: wire.Found) -> Iterator[tuple[wire.Piece, ...]]:
        """The pieces of a lookup, and the proof afterwards that they stayed.

        Use what was read only after the block ended without an error: a lease that ran out meanwhile raises
        LeaseError at its end, and the bytes may be another chunk's.
        """
        if found.lease is None:
            yield ()
            return
        try:
            yield found.pieces
        except BaseException:
            with contextlib.suppress(BlendHubError):
                self.release(found.lease)
            raise
        self.release(found.lease)

    def shard(self, slot: int) -> Bytes:
        """This rank's part of a slot, in place."""
        if self.arena is None:
            raise HubError("the hub's arena is on another machine; use fetch and put")
        return self.arena.slot(self.shard_at(slot), self.namespace.layout.shard_bytes)

    def shard_at(self, slot: int) -> int:
        """Where in the arena this rank's part of a slot begins."""
        return slot + self._rank * self.namespace.layout.shard_bytes

    def fetch(self, lease: int) -> list[Buffer]:
        """This rank's shards of a lease's pieces, through the transport; for hubs on other machines."""
        message = wire.Fetch(**self._ids(), lease=lease)
        return list(self._submit(wire.Bytes, message).payload())

    # Writing.

    def reserve(self, tokens: TokenBuffer, span: Span, *, exact: bool = True, run: int | None = None) -> Reservation:
        """Slots for the KV of ``span``; the reply's span leaves out what is stored already, and may be empty."""
        session, asked_at = self._session, self._clock()
        message = wire.Reserve(session=session.session, epoch=session.epoch, span=span, exact=exact, run=run)
        answer = self._call(wire.Reserved, message, [as_tokens(tokens).data])
        right = None
        if answer.lease is not None:
            right = WriteRight(
                lease=answer.lease,
                number=answer.number,
                epoch=session.epoch,
                arena=session.arena.nonce,
                end=answer.span.end,
                # The hub counts from when it granted the lease, which was later.
                deadline=asked_at + answer.expires_s,
            )
        return Reservation(answer.span, answer.run, right, answer.slots)

    @contextlib.contextmanager
    def writing(self, right: WriteRight) -> Iterator[None]:
        """Around every write into the slots of a lease; raises LeaseError if the right to write has ended."""
        self._rights.begin_write(right)
        try:
            yield
        finally:
            self._rights.end_write(right)

    def commit(self, right: WriteRight, upto: int) -> None:
        """This rank has written its shards up to a position; when all ranks have, they are matchable."""
        if upto == right.end:
            self._end(right)
        self._call(wire.Done, wire.Commit(**self._ids(), lease=right.lease, upto=upto))

    def abort(self, right: WriteRight) -> None:
        """End a write lease; waits for writes of this process that are under way."""
        self._end(right)
        self._call(wire.Done, wire.Abort(**self._ids(), lease=right.lease))

    def put(self, right: WriteRight, position: int, shard: Buffer) -> None:
        """This rank's shard of the slot at a position, through the transport; for hubs on other machines."""
        self._call(wire.Done, wire.Put(**self._ids(), lease=right.lease, position=position), [shard])

    # The rest.

    def clear(self) -> None:
        """Forget everything stored in this namespace, except what is leased."""
        self._call(wire.Done, wire.Clear(**self._ids()))

    def stats(self) -> wire.Numbers:
        """How the hub is; needs no registration."""
        return self._call(wire.Numbers, wire.Stats())

    def keep_alive(self) -> None:
        """Ping the hub, or register anew if it does not know this session; raises what keeps it from that."""
        if not self._is_lost:
            with contextlib.suppress(UnknownSession, StaleEpoch):
                self._ping()
        if self._is_lost:
            self._join()
        self._down.clear()

    # How it is done.

    @property
    def _session(self) -> wire.Registered:
        if self._registered is None:
            raise HubError("this client is not registered; call register first")
        return self._registered

    @property
    def _rank(self) -> int:
        assert self._register
        return self._register.rank

    def _ids(self) -> dict[str, int]:
        session = self._session
        return {"session": session.session, "epoch": session.epoch}

    def _submit(
        self,
        expected: type[R],
        message: Any,
        payload: Sequence[Buffer] = (),
        timeout: float | None = None,
        *,
        probing: bool = False,
    ) -> PendingReply[R]:
        """``probing``: ask even while the hub is known not to answer."""
        if not (probing or self.is_up):
            raise PeerGone("the hub does not answer, or the session is being registered anew; try later")
        session = message.session if isinstance(message, wire.FromSession) else None
        with self._noticing_trouble(session):
            timeout = self._timeout if timeout is None else timeout
            return PendingReply(self, session, self._connection.submit(Envelope(message, payload), timeout), expected)

    def _call(self, expected: type[R], message: Any, payload: Sequence[Buffer] = ()) -> R:
        return self._submit(expected, message, payload).result()

    @contextlib.contextmanager
    def _noticing_trouble(self, session: int | None) -> Iterator[None]:
        """Have the client's own thread look after the hub, if an error says that this is needed."""
        try:
            yield
        except (UnknownSession, StaleEpoch):
            if self._registered and self._registered.session == session:
                self._is_lost = True
                self._down.set()
            raise
        except (PeerGone, DeadlineExceeded):
            if self._registered and self._registered.session == session:
                self._down.set()
            raise

    def _end(self, right: WriteRight) -> None:
        self._rights.end(right)
        if not self._rights.wait_until_idle(self._timeout, right.lease):
            raise HubError(f"a write into lease {right.lease} has not ended; try again")

    def _ping(self) -> None:
        ended = self._rights.to_acknowledge()
        answer = self._submit(wire.Pong, wire.Ping(**self._ids(), let_go=ended), probing=True).result()
        self._rights.acknowledged(ended)
        self._rights.revoke(answer.revoked)

    def _join(self) -> None:
        """Register, and map the arena. To be called by one thread at a time; no lock is held meanwhile."""
        assert self._register
        self._rights.end_session()
        if not self._rights.wait_until_idle(self._timeout):
            raise HubError("a write into the arena has not ended; the client registers anew after it")
        # A hub that is down is found out sooner than one that compiles.
        self._submit(wire.Numbers, wire.Stats(), probing=True).result()
        answer = self._submit(wire.Registered, self._register, (), REGISTER_TIMEOUT_S, probing=True).result()
        self._registered = answer
        try:
            if self.arena is None or self.arena.name != answer.arena:
                self.arena = ArenaView(answer.arena)
        except HubError as error:
            self.arena, self.arena_trouble = None, str(error)
            log.info("KV goes through the transport: %s", error)
        if self.arena and self._rank >= 0:
            mapped = wire.Mapped(**self._ids(), nonce=answer.arena.nonce, mapping=self.arena.mapping)
            may = self._submit(wire.MayWrite, mapped, probing=True).result()
            self._rights.begin_session(answer.epoch, answer.arena.nonce, may.first, may.granted, may.longest_lease_s)
        self._is_lost = False
        self.registrations += 1

    def _keep_alive_regularly(self) -> None:
        failing = False
        while True:
            self._down.wait(self._session.ping_every_s)
            if self._closed.is_set():
                return
            before = self.registrations
            try:
                self.keep_alive()
            except Exception as error:  # without this thread the session would end
                self._down.set()
                if not failing and not self._closed.is_set():
                    expected = isinstance(error, BlendHubError)
                    log.warning(
                        "the hub does not answer, KV is neither loaded nor saved: %s", error, exc_info=not expected
                    )
                failing = True
                self._closed.wait(RETRY_S)
                continue
            if failing or self.registrations > before:
                log.info("the hub answers again" if self.registrations == before else "registered anew with the hub")
            failing = False
