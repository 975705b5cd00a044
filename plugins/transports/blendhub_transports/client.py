"""The client's side of the zmq transport. No thread of its own: whoever waits for a reply does the work.

A ZeroMQ socket is for one thread at a time, and a hop to another thread costs more than the request. So the
threads of a connection take turns: one *leads*, that is, it holds the lock, sends what others queued and
settles what is answered. The others sleep on events. Whoever gives up the lead looks back for work left over.
"""

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

import zmq

from blendhub.contracts.transport import Buffer, Codec, Connection, Envelope, Pending
from blendhub.errors import BlendHubError, Busy, DeadlineExceeded, PeerGone, ProtocolError
from blendhub_transports import frames
from blendhub_transports.dealer import Dealer
from blendhub_transports.endpoints import Endpoint
from blendhub_transports.error_codec import decode_error
from blendhub_transports.options import ZmqOptions
from blendhub_transports.pending import Event, Wake, deadline_after, sleep_on
from blendhub_transports.socket_file import why_nobody_answers

log = logging.getLogger("blendhub.transports")

MONITOR_AGE_S = 0.001
"""How old the news of the link may be when something is sent: asking for it costs as much as sending."""

Answer: TypeAlias = tuple[frames.Header, memoryview, list[memoryview]]
"""What came back, not yet decoded: that is for the thread that wants it."""


class ZmqPending(Pending):
    def __init__(self, connection: "ZmqConnection", number: int, timeout: float, deadline: float) -> None:
        self._connection = connection
        self.number = number
        self.timeout = timeout
        self.deadline = deadline
        self.outcome: Answer | BlendHubError | None = None

    def done(self) -> bool:
        if self.outcome is None:
            self._connection.progress(self)
        return self.outcome is not None

    def result(self) -> Envelope:
        while self.outcome is None:
            self._connection.wait_for(self)
        return self._connection.opened(self.outcome)


class ZmqConnection(Connection):
    def __init__(self, where: Endpoint, dial: Callable[[Wake], Dealer], codec: Codec, options: ZmqOptions) -> None:
        self._where = where
        self._endpoint = where.text
        self._dial = dial
        self._codec = codec
        self._options = options
        self._most_pending = options.max_pending
        self._closed = False
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._pending: dict[int, ZmqPending] = {}
        self._outbox: deque[tuple[ZmqPending, bytes, Sequence[Buffer]]] = deque()
        self._lead = threading.Lock()
        self._asleep = False
        self._followers: deque[tuple[ZmqPending, Event]] = deque()
        self._wake = Wake()
        self._dealer: Dealer | None = None
        self._monitor_checked_at = 0.0

    def submit(self, request: Envelope, timeout: float) -> ZmqPending:
        deadline = deadline_after(timeout)
        if self._closed:
            raise self._gone_by_closing()
        if os.getpid() != self._process:
            raise PeerGone(f"this connection to {self._endpoint} belongs to the process that this one forked from")
        number = next(self._numbers)
        frame = self._frame(request, number, timeout)
        if len(self._pending) >= self._most_pending:
            self._make_room()
        pending = ZmqPending(self, number, timeout, deadline)
        self._pending[number] = pending
        self._outbox.append((pending, frame, request.payload))
        self._look_back()
        return pending

    def close(self) -> None:
        self._closed = True
        self._wake.up()
        with self._lead:
            for pending in list(self._pending.values()):
                self._settle(pending, self._gone_by_closing())
            if self._dealer:
                self._dealer.close()
                self._dealer = None

    def progress(self, pending: ZmqPending) -> None:
        """Do what can be done for ``pending`` without waiting."""
        if self._lead.acquire(False):
            try:
                if self._outbox:
                    self._send()
                self._check_monitor()
                self._receive(pending)
            finally:
                self._lead.release()
                self._look_back()
        if pending.outcome is None and time.monotonic() >= pending.deadline:
            self._expire(pending)

    def wait_for(self, pending: ZmqPending) -> None:
        """Lead until ``pending`` is settled, or follow until it is or the lead is free."""
        try:
            if self._lead.acquire(False):
                try:
                    self._lead_until(pending)
                finally:
                    self._lead.release()
            else:
                self._follow(pending)
        finally:
            if self._outbox or self._followers:
                self._look_back()

    def opened(self, outcome: Answer | BlendHubError) -> Envelope:
        """The reply that this is; raises if it is an error instead."""
        if isinstance(outcome, BlendHubError):
            raise outcome
        header, body, payload = outcome
        if header.kind == frames.ERROR:
            raise decode_error(body)
        frames.check_versions(header, self._codec.version, reader="the client", writer="the server")
        return Envelope(self._codec.decode(body), payload)

    def _lead_until(self, pending: ZmqPending) -> None:
        while True:
            if self._outbox:
                self._send()
            self._receive(pending)
            if pending.outcome is not None:
                return
            remaining = pending.deadline - time.monotonic()
            if remaining <= 0:
                self._expire(pending)
                return
            self._asleep = True
            try:
                # Asked after _asleep is set: who adds to the outbox later sees that, and wakes us.
                news = not self._outbox and not self._closed and self._connected_dealer().wait(remaining)
            finally:
                self._asleep = False
            if news:
                self._check_monitor()

    def _follow(self, pending: ZmqPending) -> None:
        event: Event = SimpleQueue()
        follower = (pending, event)
        self._followers.append(follower)
        try:
            # Asked after the event is up: a leader who left, or settled this, before that did not ring it.
            if self._lead.locked() and pending.outcome is None and not sleep_on(event, pending.deadline):
                self._expire(pending)
        finally:
            self._followers.remove(follower)

    def _look_back(self) -> None:
        """See that somebody does what came up while the lead was held."""
        while self._outbox and self._lead.acquire(False):
            try:
                self._send()
            finally:
                self._lead.release()
        if self._outbox and self._asleep:
            self._wake.up()
        if self._followers and not self._lead.locked():
            self._ring()

    # What follows is done by the leader.

    def _connected_dealer(self) -> Dealer:
        if self._dealer is None:
            self._dealer = self._dial(self._wake)
        return self._dealer

    def _send(self) -> None:
        if time.monotonic() - self._monitor_checked_at > MONITOR_AGE_S:
            self._check_monitor()
        while self._outbox:
            pending, frame, payload = self._outbox.popleft()
            if self._closed:
                self._settle(pending, self._gone_by_closing())
            if pending.outcome is not None:
                continue
            try:
                frames.send(self._connected_dealer().send, frame, payload)
            except zmq.Again:
                self._settle(pending, self._busy("high_water_mark", self._options.high_water_mark))

    def _receive(self, pending: ZmqPending) -> None:
        """Settle what is answered, up to ``pending``: what comes after it is for the next leader."""
        if self._closed:
            self._settle(pending, self._gone_by_closing())
        socket = self._connected_dealer().socket
        while pending.outcome is None:
            try:
                first, payload = frames.receive(socket, frames.LAST)
            except zmq.Again:
                return
            try:
                for header, message in frames.each_message(first.buffer):
                    answered = self._pending.get(header.number)
                    if answered:
                        self._settle(answered, (header, message, payload))
            except ProtocolError as error:
                log.warning("%s sent what is no answer: %s", self._endpoint, error)
            if self._outbox:
                self._send()

    def _check_monitor(self) -> None:
        """If the server went away, it answers nothing; what was not sent yet is told too, rather than left to wait."""
        self._monitor_checked_at = time.monotonic()
        ended = self._dealer.ended() if self._dealer else None
        if self._dealer and ended:
            self._dealer.close()
            self._dealer = None
            for pending in list(self._pending.values()):
                self._settle(pending, PeerGone(f"{ended}; the request may or may not have been carried out"))

    # What any thread may do.

    def _frame(self, request: Envelope, number: int, timeout: float) -> bytes:
        codec, options = self._codec, self._options
        # Rounded up, so that a server on the same clock never gives up before the caller does.
        timeout_ms = math.ceil(timeout * 1000)
        message, patient = codec.encode(request.message), bool(self._pending)
        frame = frames.request(codec.version, number, message, timeout_ms, time.time(), patient=patient)
        frames.check_sendable(frame, request.payload, options.max_frame_bytes, options.max_payload_frames)
        return frame

    def _settle(self, pending: ZmqPending, outcome: Answer | BlendHubError) -> None:
        if self._pending.pop(pending.number, None):
            pending.outcome = outcome
            if self._followers:
                self._ring(pending)

    def _ring(self, pending: ZmqPending | None = None) -> None:
        """Wake who waits for ``pending``, or all who wait."""
        # A copy, since threads come and go meanwhile.
        for waited_for, event in tuple(self._followers):
            if pending is None or waited_for is pending:
                event.put(None)

    def _expire(self, pending: ZmqPending) -> None:
        path = self._where.path
        why = why_nobody_answers(path) or "is it overloaded?" if path else "does a hub run there, can it be reached?"
        sentence = f"{self._endpoint} did not answer within {pending.timeout:g} s; {why}"
        self._settle(pending, DeadlineExceeded(sentence))

    def _make_room(self) -> None:
        """Give up what nobody waited for in time; raises Busy if that is not enough."""
        now = time.monotonic()
        for pending in [pending for pending in list(self._pending.values()) if pending.deadline <= now]:
            self._expire(pending)
        if len(self._pending) >= self._options.max_pending:
            raise self._busy("max_pending", self._options.max_pending)

    def _busy(self, option: str, limit: int) -> Busy:
        return Busy(f"this connection to {self._endpoint} has {limit} requests under way, as many as {option} allows")

    def _gone_by_closing(self) -> PeerGone:
        return PeerGone(f"this connection to {self._endpoint} was closed")
