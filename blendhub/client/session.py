"""A process's session with the hub: the connection, its registration and the thread that keeps it alive."""

import contextlib
import logging
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from blendhub.client import wire
from blendhub.client.arena_view import ArenaView
from blendhub.client.write_rights import WriteRights
from blendhub.contracts import Envelope
from blendhub.contracts.transport import Buffer, Connection, Pending
from blendhub.core.errors import (
    BlendHubError,
    Busy,
    DeadlineExceeded,
    HubError,
    InvalidInput,
    PeerGone,
    ProtocolError,
    StaleEpoch,
    UnknownSession,
)
from blendhub.core.layout import Namespace
from blendhub.framework.host import PluginHost
from blendhub.system.processes import ProcessId

log = logging.getLogger(__name__)
R = TypeVar("R")
TIMEOUT_S = 5.0
REGISTER_TIMEOUT_S = 60.0
"""The timeout of a registration, for which the hub may have to compile an engine's matchers."""

RETRY_S = 0.1
"""How often a hub that cannot be used is tried again."""
LEAVE_TIMEOUT_S = 1.0
"""The timeout of leaving the hub, which notices in any case that a process has left."""


class PendingReply(Generic[R]):
    """The reply to a request, which may not have come yet."""

    def __init__(self, owner: "HubSession", request: Any, pending: Pending, expected: type[R]) -> None:
        self._owner = owner
        self.request = request
        self._pending = pending
        self._expected = expected
        self.reply: R | None = None
        self.error: BlendHubError | None = None
        """Both are kept by ``result``."""

    def done(self, within: float = 0.0) -> bool:
        """Whether ``result`` returns at once; true at the latest when the timeout has passed. Waits for that, but no
        longer than ``within`` seconds.
        """
        return self._pending.done(within)

    def result(self) -> R:
        """The reply; raises the error that the hub answered with. Waits until the timeout, unless ``done``."""
        if self.error:
            raise self.error
        try:
            reply = self._pending.result().message
            if not isinstance(reply, self._expected):
                expected = self._expected.__name__
                raise ProtocolError(f"the hub answered {type(reply).__name__} where {expected} was expected")
        except BlendHubError as error:
            self.error = error
            self._owner._notice(error, self.request)
            raise
        self.reply = reply
        return reply


class HubSession:
    """One session of one process, for all namespaces of its engine.

    All methods may be called from several threads; every one ends by its timeout. A thread of the session keeps it:
    it pings the hub, and registers where the hub does not know the session, again and again until that succeeds.
    Meanwhile every call fails at once.

    Errors are those of ``blendhub.core.errors``. After ``UnknownSession``, ``StaleEpoch``, ``PeerGone`` or
    ``DeadlineExceeded`` the session is not ``is_up``: calls raise PeerGone until the session's thread has reached the
    hub. Leases from before a registration have ended; a hub that was restarted has another ``epoch``.
    """

    def __init__(
        self,
        endpoint: str,
        transport: str = "zmq",
        options: dict[str, Any] | None = None,
        *,
        host: PluginHost | None = None,
        timeout: float = TIMEOUT_S,
        background: bool = True,
    ) -> None:
        """``background`` false: the caller calls ``keep_alive`` regularly, instead of a thread of the session."""
        self._connection: Connection = (
            (host or PluginHost.discover())
            .create("transport", transport, options)
            .connect(endpoint, wire.client_codec())
        )
        self._endpoint = endpoint
        self._timeout = timeout
        self._background = background
        self._id = secrets.randbits(62)
        self._register: wire.Register | None = None
        self._registered: wire.Registered | None = None
        self._rights = WriteRights()
        self._closed = threading.Event()
        self._down = threading.Event()
        """Whether the hub does not answer, or does not know this session: then requests fail without waiting."""
        self._is_lost = False
        """Whether the hub does not know this session any more."""
        self._trouble: Exception | None = None
        """Why the session is not ``is_up``, or was not the last time."""
        self._keeper = threading.Thread(target=self._keep, name="blendhub-session", daemon=True)
        self.first_attempt: Future[None] = Future()
        """Ends with the first attempt of ``keep``: with an error if the hub answers, and refuses this process."""
        self.arena: ArenaView | None = None
        """The hub's arena, mapped; None before the first registration."""
        self.registrations = 0
        self._abandoned: dict[int, Pending | None] = {}
        """The leases that a ping has yet to end, and the requests to wait for, which bring them or end them."""

    def register(self, engine: str, namespace: Namespace, rank: int = -1, *, waits: bool = True) -> None:
        """Join an engine, whose requests without LoRA and salt have this namespace.

        Raises if the hub does not answer; if not ``waits``, returns at once, and joins as soon as the hub answers.
        ``rank`` is -1 for a process that reads and writes no KV itself.
        """
        if self._register is not None:
            raise HubError("this client is registered already; a client is one session")
        self._register = wire.Register(
            engine=engine, rank=rank, process=ProcessId.mine(), namespace=namespace, client=self._id
        )
        if waits:
            try:
                self._join()
            except BaseException:
                self._register = self._registered = None
                raise
        else:
            self._is_lost = True
            self._down.set()
        if self._background:
            self._keeper.start()

    @property
    def is_up(self) -> bool:
        """Whether the hub answered when it was last asked, and knows this session."""
        return not self._down.is_set()

    def check_up(self) -> None:
        """Raise PeerGone if the session is not ``is_up``: it says what is the matter, and what an operator may do."""
        if self.is_up:
            return
        if self._closed.is_set():
            raise PeerGone(f"this client has left the hub at {self._endpoint}")
        raise PeerGone(
            f"no session with the hub at {self._endpoint}: {self._trouble}. This process registers as soon as the hub "
            f"answers; see whether it runs: blendhub check --only hub --endpoint {self._endpoint}"
        )

    @property
    def epoch(self) -> int:
        """A number that a hub chooses at its start."""
        return self.registered.epoch

    @property
    def namespace(self) -> Namespace:
        """The namespace of requests without LoRA and salt."""
        return self._introduced.namespace

    @property
    def rank(self) -> int:
        """-1 for a process that reads and writes no KV itself."""
        return self._introduced.rank

    def close(self, timeout: float = LEAVE_TIMEOUT_S) -> None:
        """End the session and its leases. Closing twice is fine.

        A hub that does not answer by the timeout notices the end of this process.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._rights.close()
        # If a write goes on, the hub waits for the end of this process's mapping instead.
        if self._registered and self.is_up and self._rights.wait_until_idle(self._timeout):
            with contextlib.suppress(BlendHubError):
                leaving = wire.Unregister(**self._ids())
                self._submit(wire.Done, leaving, timeout=min(self._timeout, timeout)).result()
        self._down.set()
        self._connection.close()
        # The hub may wait for the end of this mapping.
        if self.arena:
            self.arena.release()
        if self._keeper.is_alive():
            self._keeper.join(self._timeout)

    def abandon(self, lease: int, pending: Pending | None = None) -> None:
        """Have a ping end a lease, if it holds, once ``pending`` was answered or is late."""
        self._abandoned[lease] = pending

    def keep_alive(self) -> None:
        """Ping the hub, or register anew if it does not know this session; raises the error if that fails."""
        if not self._is_lost:
            with contextlib.suppress(UnknownSession, StaleEpoch):
                self._ping()
        if self._is_lost:
            self._join()
        self._down.clear()

    @property
    def _introduced(self) -> wire.Register:
        if self._register is None:
            raise HubError("this client is not registered; call register first")
        return self._register

    @property
    def registered(self) -> wire.Registered:
        """The last registration: its epoch and its arena belong together, whatever the session's thread does."""
        if self._registered is None:
            self.check_up()
            raise HubError("this client is not registered; call register first")
        return self._registered

    def _ids(self) -> dict[str, Any]:
        session = self.registered
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
        return PendingReply(self, message, self._send(message, payload, timeout, probing=probing), expected)

    def _send(
        self, message: Any, payload: Sequence[Buffer] = (), timeout: float | None = None, *, probing: bool = False
    ) -> Pending:
        """Send a request. ``probing``: even while the hub is known not to answer."""
        if not probing:
            self.check_up()
        try:
            return self._connection.submit(Envelope(message, payload), self._timeout if timeout is None else timeout)
        except BlendHubError as error:
            self._notice(error, message)
            raise

    def _call(self, expected: type[R], message: Any, payload: Sequence[Buffer] = ()) -> R:
        return self._submit(expected, message, payload).result()

    def _notice(self, error: BlendHubError, request: Any) -> None:
        """Have the session's thread reach the hub again, after an error that makes this necessary."""
        is_lost = isinstance(error, UnknownSession | StaleEpoch)
        if not is_lost and not isinstance(error, PeerGone | DeadlineExceeded):
            return
        session = request.session if isinstance(request, wire.FromSession) else None
        if self._registered and self._registered.session == session:
            self._trouble = error
            self._is_lost |= is_lost
            self._down.set()

    def _ping(self) -> None:
        ended = self._rights.to_acknowledge()
        waiting = list(self._abandoned.items())
        abandoned = [lease for lease, pending in waiting if pending is None or pending.done()][: wire.MAX_ITEMS]
        ping = wire.Ping(**self._ids(), acknowledged=ended, abandoned=tuple(abandoned))
        answer = self._submit(wire.Pong, ping, probing=True).result()
        for lease in abandoned:
            del self._abandoned[lease]
        self._rights.acknowledged(ended)
        self._rights.revoke(answer.revoked)

    def _join(self) -> None:
        """Register, and map the arena. To be called by one thread at a time; no lock is held meanwhile."""
        self._rights.end_session()
        if not self._rights.wait_until_idle(self._timeout):
            raise HubError("a write into the arena has not ended; the client registers anew after it")
        # Answered at once, so that a hub that is down is noticed before the long timeout of a registration.
        self._submit(wire.HubStats, wire.Stats(), probing=True).result()
        answer = self._submit(wire.Registered, self._introduced, (), REGISTER_TIMEOUT_S, probing=True).result()
        self._registered = answer
        if self.arena is None or self.arena.name != answer.arena:
            self.arena = ArenaView(answer.arena)
        if self.rank >= 0:
            mapped = wire.Mapped(**self._ids(), nonce=answer.arena.nonce, mapping=self.arena.mapping)
            try:
                leases = self._submit(wire.MayWrite, mapped, probing=True).result()
            except InvalidInput:
                self.arena = None  # mapped anew with the next registration
                raise
            self._rights.begin_session(answer.epoch, answer.arena.nonce, leases.first, leases.granted)
        self._is_lost = False
        self.registrations += 1
        self._down.clear()

    def _keep(self) -> None:
        is_failing = False
        while not self._closed.is_set():
            if self._registered and not is_failing:
                self._down.wait(self._registered.ping_every_s)
                if self._closed.is_set():
                    break
            before = self.registrations
            try:
                self.keep_alive()
            except Exception as error:  # without this thread the session would end
                self._trouble = error
                self._down.set()
                if not is_failing and not self._closed.is_set():
                    log.warning(
                        "BlendHub: no session with the hub at %s: %s. Until there is one, requests are served without "
                        "reuse",
                        self._endpoint, error, exc_info=not isinstance(error, BlendHubError),
                    )  # fmt: skip
                self._end_first_attempt(error)
                is_failing = True
                self._closed.wait(RETRY_S)
                continue
            if is_failing or self.registrations > before > 0:
                log.info("BlendHub: the hub at %s answers; it is used from now on", self._endpoint)
            self._end_first_attempt()
            is_failing = False
        self._end_first_attempt()

    def _end_first_attempt(self, error: Exception | None = None) -> None:
        if self.first_attempt.done():
            return
        if error is None or isinstance(error, PeerGone | DeadlineExceeded | Busy):
            self.first_attempt.set_result(None)
        else:
            self.first_attempt.set_exception(error)
