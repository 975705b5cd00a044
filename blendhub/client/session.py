"""A process's session with the hub: the connection, its registration and the thread that keeps it alive."""

import contextlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from blendhub.client import wire
from blendhub.client.answer import Answer, expecting
from blendhub.client.arena_view import ArenaView
from blendhub.client.write_rights import WriteRight, WriteRights
from blendhub.contracts import Envelope
from blendhub.contracts.transport import Buffer, Connection, Pending
from blendhub.core.errors import (
    BlendHubError,
    Busy,
    DeadlineExceeded,
    HubError,
    InvalidInput,
    PeerGone,
    StaleEpoch,
    UnknownSession,
)
from blendhub.core.layout import Namespace
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost
from blendhub.system.processes import ProcessId

log = logging.getLogger(__name__)
M = TypeVar("M", bound=wire.FromSession)
R = TypeVar("R")
TIMEOUT_S = 5.0
REGISTER_TIMEOUT_S = 60.0
"""The timeout of a registration, for which the hub may have to compile an engine's matchers."""
RESERVE_TIMEOUT_S = 60.0
"""The timeout of a reservation; no step waits for the answer. If the timeout passes, the session registers anew, which
ends all of its leases: the hub may have granted one whose number never arrived."""

RETRY_S = 0.1
"""How often a hub that cannot be used is tried again."""
CLEAR_RETRY_S = 1.0
"""How often a clear that failed is tried again."""
LEAVE_TIMEOUT_S = 1.0
"""The timeout of leaving the hub, which notices in any case that a process has left."""
DONE = expecting(wire.Done)


class Reservation(msgspec.Struct, frozen=True):
    """Slots for ``span``: the requested span without what is stored already; no right if nothing is left to write."""

    span: Span
    run: int | None
    right: WriteRight | None
    slots: tuple[wire.Slot, ...]
    provenance: Provenance
    """Says what each slot has room for behind its KV: a state or a map."""


class HubSession:
    """One session of one process, for all namespaces of its engine.

    All methods may be called from several threads. Requests return an ``Answer`` at once; what cannot be sent is one
    that has failed. A thread of the session keeps it: it pings the hub, and registers where the hub does not know the
    session, again and again until that succeeds. Meanwhile every request fails at once.

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
        self._wake = threading.Event()
        """Set when the session's thread has something to do before the next ping."""
        self._is_down = False
        """Whether the hub does not answer, or does not know this session: then requests fail at once."""
        self._is_lost = False
        """Whether the hub does not know this session any more."""
        self._trouble: Exception | None = None
        """Why the session is not ``is_up``, or was not the last time."""
        self._keeper = threading.Thread(target=self._keep, name="blendhub-session", daemon=True)
        self._first_attempt: Future[None] = Future()
        """Ends with the first attempt to join: with an error if the hub answers, and refuses this process."""
        self.arena: ArenaView | None = None
        """The hub's arena, mapped; None before the first registration."""
        self.registrations = 0
        self.ratio: float | None = None
        """The share of moved text to recompute that the hub has last named."""
        self._abandoned: dict[int, Pending | None] = {}
        """The leases that a ping has yet to end, and the requests to wait for, which end them, too."""
        self._closing: deque[Answer[Any]] = deque()
        """Answers whose leases must end as soon as they arrive: the callers have given the requests up."""
        self._clears = self._cleared = 0
        """The number of clears that were requested, and the number that the hub has done."""
        self._clear: tuple[int, Answer[wire.Done]] | None = None
        """The clear under way, and its number."""

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
            self._is_lost = self._is_down = True
        if self._background:
            self._keeper.start()

    @property
    def is_up(self) -> bool:
        """Whether requests can be sent: the hub answered when it was last asked, and knows this session."""
        return not (self._is_down or self.is_clearing)

    @property
    def is_clearing(self) -> bool:
        """Whether the hub has yet to clear the engine: until then it would find what is to be forgotten."""
        return self._cleared < self._clears

    @property
    def has_tried(self) -> bool:
        """Whether the first attempt to reach the hub is over."""
        return self._first_attempt.done()

    def reach(self) -> None:
        """Wait for the first attempt to reach the hub. An absent hub is tried again; other errors are raised."""
        self._first_attempt.result()

    def check_up(self) -> None:
        """Raise PeerGone if no request can be sent: it says what is the matter, and what an operator may do."""
        if self.is_clearing:
            raise PeerGone("the hub has not cleared the cache yet")
        if not self._is_down:
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

    def clear_all(self) -> None:
        """Have the hub clear all namespaces of the engine. Until it has, every request fails: see ``is_clearing``."""
        self._clears += 1
        self._wake.set()

    def close(self, timeout: float = LEAVE_TIMEOUT_S) -> None:
        """End the session and its leases. Closing twice is fine.

        A hub that does not answer by the timeout notices the end of this process.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._rights.close()
        # If a write goes on, the hub waits for the end of this process's mapping instead.
        if self._registered and not self._is_down and self._rights.wait_until_idle(self._timeout):
            leaving = self._ask(DONE, self._message(wire.Unregister), (), timeout, probing=True)
            leaving.done(timeout)
        self._is_down = True
        self._wake.set()
        self._connection.close()
        # The hub may wait for the end of this mapping.
        if self.arena:
            self.arena.release()
        if self._keeper.is_alive():
            self._keeper.join(self._timeout)

    # Ending leases.

    def release(self, lease: int, *, timeout: float | None = None) -> Answer[wire.Done]:
        """End a read lease. The answer is LeaseError if it had ended before, or if what it covers was deleted: then
        what was read must not be used."""
        answer = self._ask(DONE, self._message(wire.Release, lease=lease), (), timeout)
        self.abandon(lease, answer.pending)  # the next ping repeats it: it may be lost
        return answer

    def abort(self, right: WriteRight) -> None:
        """End a write lease: this process writes no more under it. A ping tells the hub if a write is under way, or if
        the message is lost."""
        self._rights.end(right)
        is_writing = self._rights.is_writing(right.lease)
        answer = None if is_writing else self._ask(DONE, self._message(wire.Abort, lease=right.lease))
        self.abandon(right.lease, answer.pending if answer else None)

    def abandon(self, lease: int, pending: Pending | None = None) -> None:
        """Have a ping end a lease, if it holds, once ``pending`` was answered or is late."""
        self._abandoned[lease] = pending

    def close_answer(self, answer: Answer[Any]) -> None:
        """End the lease that an answer brought, or still brings."""
        if not answer.done():
            self._closing.append(answer)
        elif isinstance(answer.reply, Reservation):
            if answer.reply.right:
                self.abort(answer.reply.right)
        elif isinstance(answer.reply, wire.Found):
            if answer.reply.lease is not None:
                self.release(answer.reply.lease)
        elif answer.sent_at and isinstance(answer.request, wire.Lookup) and answer.request.lease is not None:
            self.abandon(answer.request.lease)  # the hub may have granted it to a reply that was lost

    def keep_alive(self) -> None:
        """Ping the hub, or register anew if it does not know this session; raises the error if that fails."""
        if not self._is_lost:
            with contextlib.suppress(UnknownSession, StaleEpoch):
                self._ping()
        if self._is_lost:
            self._join()
        self._is_down = False
        self._go_on_clearing()

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

    def _message(self, kind: type[M], **fields: Any) -> M:
        """A message of this session, or of none, if there has been none yet: then it cannot be sent."""
        joined = self._registered
        return kind(session=joined.session if joined else 0, epoch=joined.epoch if joined else 0, **fields)

    def _ask(
        self,
        read: Callable[[Any], R],
        message: wire.Message,
        payload: Sequence[Buffer] = (),
        timeout: float | None = None,
        *,
        probing: bool = False,
        check: Callable[[], None] | None = None,
        ends: int | None = None,
    ) -> Answer[R]:
        """Send a message. ``probing``: even while the hub is known not to answer. ``check`` raises why it must not be
        sent. ``ends``: the lease that it ends."""
        answer = Answer(self, message, read, ends)
        try:
            if check:
                check()
            if not probing:
                self.check_up()
            if isinstance(message, wire.FromSession):
                assert self.registered  # raises if there has been none
        except BlendHubError as error:  # of which the session knows
            answer.fail(error)
            return answer
        try:
            timeout = self._timeout if timeout is None else timeout
            answer.sent(self._connection.submit(Envelope(message, payload), timeout))
        except BlendHubError as error:
            answer.fail(error)
            self.notice(error, message)
        return answer

    def notice(self, error: BlendHubError, request: Any) -> None:
        """Have the session's thread reach the hub again, after an error that makes this necessary."""
        is_lost = isinstance(error, UnknownSession | StaleEpoch)
        # The hub may have granted a lease on slots that nobody would end: a new session begins without leases.
        is_lost |= isinstance(error, DeadlineExceeded) and isinstance(request, wire.Reserve)
        if not is_lost and not isinstance(error, PeerGone | DeadlineExceeded):
            return
        session = request.session if isinstance(request, wire.FromSession) else None
        if self._registered and self._registered.session == session:
            self._trouble = error
            self._is_lost |= is_lost
            self._is_down = True
            self._wake.set()

    def _ping(self) -> None:
        for _ in range(len(self._closing)):
            self.close_answer(self._closing.popleft())
        ended = self._rights.to_acknowledge()
        abandoned = [
            lease
            for lease, pending in list(self._abandoned.items())
            if not self._rights.is_writing(lease) and (pending is None or pending.done())
        ][: wire.MAX_ITEMS]
        ping = self._message(wire.Ping, acknowledged=ended, abandoned=tuple(abandoned))
        answer = self._ask(expecting(wire.Pong), ping, probing=True).result()
        for lease in abandoned:
            del self._abandoned[lease]
        self._rights.acknowledged(ended)
        self._rights.revoke(answer.revoked)

    def _go_on_clearing(self) -> None:
        if not self.is_clearing:
            return
        if not self._clear:
            self._clear = self._clears, self._ask(DONE, self._message(wire.Clear), probing=True)
        number, answer = self._clear
        if answer.done(RETRY_S):
            self._clear = None
            if answer.error is None:
                self._cleared = number
            else:
                log.warning(
                    "BlendHub: the cache could not be cleared yet; nothing is reused until it is: %s", answer.error
                )

    def _join(self) -> None:
        """Register, and map the arena. To be called by one thread at a time; no lock is held meanwhile."""
        self._rights.end_session()
        if not self._rights.wait_until_idle(self._timeout):
            raise HubError("a write into the arena has not ended; the client registers anew after it")
        # Answered at once, so that a hub that is down is noticed before the long timeout of a registration.
        self._ask(expecting(wire.HubStats), wire.Stats(), probing=True).result()
        register = msgspec.structs.replace(self._introduced, ratio=self.ratio)
        joining = self._ask(expecting(wire.Registered), register, (), REGISTER_TIMEOUT_S, probing=True)
        answer = joining.result()
        self._registered = answer
        if self.arena is None or self.arena.name != answer.arena:
            self.arena = ArenaView(answer.arena)
        if self.rank >= 0:
            mapped = self._message(wire.Mapped, nonce=answer.arena.nonce, mapping=self.arena.mapping)
            try:
                leases = self._ask(expecting(wire.MayWrite), mapped, probing=True).result()
            except InvalidInput:
                self.arena = None  # mapped anew with the next registration
                raise
            self._rights.begin_session(answer.epoch, answer.arena.nonce, leases.first, leases.granted)
        self._is_lost = self._is_down = False
        self.registrations += 1

    def _keep(self) -> None:
        is_failing = False
        while not self._closed.is_set():
            if self._registered and not is_failing:
                pause = self._registered.ping_every_s
                self._wake.wait(min(pause, CLEAR_RETRY_S) if self.is_clearing else pause)
                self._wake.clear()
                if self._closed.is_set():
                    break
            before = self.registrations
            try:
                self.keep_alive()
            except Exception as error:  # without this thread the session would end
                self._trouble = error
                self._is_down = True
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
        if self._first_attempt.done():
            return
        if error is None or isinstance(error, PeerGone | DeadlineExceeded | Busy):
            self._first_attempt.set_result(None)
        else:
            self._first_attempt.set_exception(error)
