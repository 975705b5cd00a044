"""The hub as a Python object, over any transport.

A client is one session of one engine. It pings by itself, notices when the hub was restarted, and registers again.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from blendhub import wire
from blendhub.arena_view import ArenaView
from blendhub.contracts import Parcel
from blendhub.contracts.transport import Buffer, Pending
from blendhub.errors import BlendHubError, HubError, LeaseError, PeerGone, StaleEpoch, TransportError, UnknownSession
from blendhub.host import PluginHost
from blendhub.layout import Namespace
from blendhub.plan import Match, Span
from blendhub.processes import ProcessId
from blendhub.tokens import TokenBuffer, as_tokens

log = logging.getLogger(__name__)
R = TypeVar("R")
TIMEOUT_S = 5.0
REGISTER_TIMEOUT_S = 60.0
"""A hub that meets a namespace for the first time may have to compile its matchers."""

RETRY_S = 0.1

Bytes = npt.NDArray[np.uint8]


class LookupPending:
    """A lookup under way; the hub may be fetching what it found from its store meanwhile."""

    def __init__(self, client: "HubClient", session: int, pending: Pending) -> None:
        self._client = client
        self._session = session
        self._pending = pending

    def done(self) -> bool:
        """Whether ``result`` returns at once. Never blocks."""
        return self._pending.done()

    def result(self) -> wire.Found:
        """What was found. If the hub was restarted meanwhile that is nothing, and the error says so."""
        message = self._client._again(self._pending.result, self._session).message
        assert isinstance(message, wire.Found)
        return message


class HubClient:
    """One session. All methods may be called from several threads; every one ends by its timeout.

    Errors are those of ``blendhub.errors``. After ``UnknownSession`` or ``StaleEpoch`` the client has registered
    again; leases from before have ended, and ``epoch`` tells the lives of the hub apart.
    """

    def __init__(
        self,
        endpoint: str,
        transport: str = "zmq",
        options: dict[str, Any] | None = None,
        *,
        host: PluginHost | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._connection = (
            (host or PluginHost.discover())
            .create("transport", transport, options)
            .connect(endpoint, wire.client_codec())
        )
        self._timeout = timeout
        self._registering = threading.Lock()
        self._register: wire.Register | None = None
        self._registered: wire.Registered | None = None
        self._writing = threading.Condition()
        """Guards the two below: no slot of a revoked lease is written, and none is let go while it is."""
        self._writes: dict[int, int] = {}
        self._revoked: set[int] = set()
        self._closed = threading.Event()
        self._trouble = threading.Event()
        """The hub went away. Until it answers a ping again, requests fail at once instead of waiting in vain."""
        self._pinger = threading.Thread(target=self._ping_on, name="blendhub-ping", daemon=True)
        self.arena: ArenaView | None = None
        """The hub's arena, mapped; None if the hub is on another machine."""
        self.registrations = 0

    # Sessions.

    def register(self, engine: str, namespace: Namespace, rank: int = -1) -> None:
        """Join an engine. ``rank`` is -1 for a process that reads and writes no KV itself."""
        if self._registered is not None:
            raise HubError("this client is registered already; a client is one session")
        self._register = wire.Register(engine=engine, rank=rank, process=ProcessId.mine(), namespace=namespace)
        self._join()
        self._pinger.start()

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
        if self._registered and not self._trouble.is_set():
            with contextlib.suppress(BlendHubError), self._no_writes():
                self._call(wire.Done, wire.Unregister(**self._ids()))
        self._trouble.set()
        self._connection.close()
        if self._pinger.is_alive():
            self._pinger.join(self._timeout)

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
        self, tokens: TokenBuffer, *, acquire: bool = True, skip_prefix: int = 0, wait_s: float = 0.0
    ) -> LookupPending:
        """The same without waiting for the answer."""
        message = wire.Lookup(**self._ids(), acquire=acquire, skip_prefix_n_tokens=skip_prefix, wait_s=wait_s)
        parcel = Parcel(message, [as_tokens(tokens).data])
        self._check_up()
        return LookupPending(self, message.session, self._connection.submit(parcel, self._timeout + wait_s))

    def prefetch(self, tokens: TokenBuffer) -> wire.Found:
        """Bring what is stored of these tokens into the arena, without waiting for it."""
        return self._call(wire.Found, wire.Prefetch(**self._ids()), [as_tokens(tokens).data])

    def acquire(self, matches: Sequence[Match], skip_prefix: int = 0) -> wire.Found:
        """A read lease on matches that a lookup named; those that are gone meanwhile are left out."""
        message = wire.Acquire(**self._ids(), matches=tuple(matches), skip_prefix_n_tokens=skip_prefix)
        return self._call(wire.Found, message)

    def release(self, lease: int) -> None:
        """End a read lease. Raises LeaseError if it had ended before: then what was read must not be used."""
        self._call(wire.Done, wire.Release(**self._ids(), lease=lease))

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
        return list(self._request(message, ()).payload)

    # Writing.

    def reserve(self, tokens: TokenBuffer, span: Span, *, exact: bool = True, run: int | None = None) -> wire.Reserved:
        """Slots for the KV of ``span``; the reply's span leaves out what is stored already, and may be empty."""
        message = wire.Reserve(**self._ids(), span=span, exact=exact, run=run)
        return self._call(wire.Reserved, message, [as_tokens(tokens).data])

    @contextlib.contextmanager
    def writing(self, lease: int) -> Iterator[None]:
        """Around every write into the slots of a lease; raises LeaseError if the hub has taken it back."""
        with self._writing:
            if lease in self._revoked:
                raise LeaseError(f"the hub has taken back write lease {lease}; reserve anew")
            self._writes[lease] = self._writes.get(lease, 0) + 1
        try:
            yield
        finally:
            with self._writing:
                self._writes[lease] -= 1
                if not self._writes[lease]:
                    del self._writes[lease]
                    self._writing.notify_all()

    def commit(self, lease: int, upto: int) -> None:
        """This rank has written its shards up to a position; when all ranks have, they are matchable."""
        self._call(wire.Done, wire.Commit(**self._ids(), lease=lease, upto=upto))

    def abort(self, lease: int) -> None:
        """Give up a write lease; waits for writes of this process that are under way."""
        with self._writing:
            self._revoked.add(lease)
            if not self._writing.wait_for(lambda: lease not in self._writes, self._timeout):
                raise HubError(f"a write into lease {lease} has not ended, so it is not given up yet; try again")
        self._call(wire.Done, wire.Abort(**self._ids(), lease=lease))

    def put(self, lease: int, position: int, shard: Buffer) -> None:
        """This rank's shard of the slot at a position, through the transport; for hubs on other machines."""
        self._call(wire.Done, wire.Put(**self._ids(), lease=lease, position=position), [shard])

    # The rest.

    def clear(self) -> None:
        """Forget everything stored in this namespace, except what is leased."""
        self._call(wire.Done, wire.Clear(**self._ids()))

    def stats(self) -> wire.Numbers:
        """How the hub is; needs no registration."""
        return self._call(wire.Numbers, wire.Stats())

    def ping(self) -> None:
        """Tell the hub that this session lives; done regularly by a thread of its own."""
        with self._writing:
            let_go = tuple(lease for lease in self._revoked if lease not in self._writes)
        answer = self._call(wire.Pong, wire.Ping(**self._ids(), let_go=let_go))
        with self._writing:
            self._revoked = (self._revoked - set(let_go)) | set(answer.revoked)

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

    def _call(self, expected: type[R], message: Any, payload: Sequence[Buffer] = ()) -> R:
        answer = self._request(message, payload).message
        assert isinstance(answer, expected)
        return answer

    def _request(self, message: Any, payload: Sequence[Buffer]) -> Parcel:
        session = message.session if isinstance(message, wire.FromSession) else None
        return self._again(lambda: self._connection.call(Parcel(message, payload), self._timeout), session)

    def _again(self, ask: Callable[[], Parcel], session: int | None) -> Parcel:
        """Ask; if the hub does not know the session that asks any more, register again before the error goes on."""
        self._check_up()
        try:
            parcel = ask()
        except (UnknownSession, StaleEpoch):
            if not self._closed.is_set():
                self._join(replaces=session)
            raise
        except PeerGone:
            if self._registered:  # otherwise nobody pings, and would notice that the hub is back
                self._trouble.set()
            raise
        return parcel

    def _check_up(self) -> None:
        if self._trouble.is_set() and threading.current_thread() is not self._pinger:
            raise PeerGone("the hub does not answer; it is asked again and again, try later")

    def _join(self, replaces: int | None = None) -> None:
        assert self._register
        with self._registering, self._no_writes():
            if replaces is not None and self._session.session != replaces:
                return  # another request found it out before
            message = wire.Register(
                engine=self._register.engine,
                rank=self._register.rank,
                process=self._register.process,
                namespace=self._register.namespace,
                replaces=replaces,
            )
            # A hub that is down is found out sooner than one that compiles.
            self._connection.call(Parcel(wire.Stats()), self._timeout)
            answer = self._connection.call(Parcel(message), REGISTER_TIMEOUT_S).message
            assert isinstance(answer, wire.Registered)
            try:
                if self.arena is None or self.arena.name != answer.arena:
                    self.arena = ArenaView(answer.arena)
            except HubError as error:
                self.arena = None
                log.info("KV goes through the transport: %s", error)
            self._registered = answer
            self._revoked.clear()
            self.registrations += 1

    @contextlib.contextmanager
    def _no_writes(self) -> Iterator[None]:
        """Until the block ends no thread of this process writes into the arena."""
        with self._writing:
            if not self._writing.wait_for(lambda: not self._writes, self._timeout):
                raise HubError("a write into the arena has not ended; the session cannot be changed meanwhile")
            yield

    def _ping_on(self) -> None:
        while True:
            self._trouble.wait(self._session.ping_every_s)
            if self._closed.is_set():
                return
            before = self._trouble.is_set()
            try:
                self.ping()
            except (UnknownSession, StaleEpoch) as error:
                log.info("registered again with the hub: %s", error)
            except TransportError as error:
                if not before:
                    log.warning("the hub does not answer, KV is neither loaded nor saved: %s", error)
                self._trouble.set()
                self._closed.wait(RETRY_S)
                continue
            except BlendHubError as error:
                log.warning("the hub refused a ping: %s", error)
            if not self._closed.is_set():
                self._trouble.clear()
