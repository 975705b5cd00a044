"""The client of the zmq transport. It has no thread: the threads that wait for replies do the work.

A ZeroMQ socket is for one thread at a time, and handing a request to another thread costs more than the request. So
the threads that share a connection take turns. One of them *leads*: it alone uses the sockets, sends what all threads
queued in the outbox, and settles every reply that arrives. The others *follow*: they sleep on a condition variable.
A leader whose own request is answered steps down and wakes the followers, and one of these leads on.
"""

import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import zmq

from blendhub.contracts.transport import Buffer, Codec, Connection, Envelope, Pending
from blendhub.core.errors import BlendHubError, Busy, DeadlineExceeded, PeerGone, ProtocolError
from blendhub_transports import frames
from blendhub_transports.deadline import deadline_after
from blendhub_transports.dealer import ClientKeys, Dealer, Wakeup
from blendhub_transports.endpoints import Endpoint
from blendhub_transports.options import ZmqOptions
from blendhub_transports.socket_file import why_unreachable
from blendhub_transports.sockets import HIGH_WATER_MARK, readable

log = logging.getLogger("blendhub.transports")

Answer: TypeAlias = tuple[frames.FrameHeader, memoryview, list[memoryview]]
"""Header, message and payload, not yet decoded: the thread that waits for them decodes them."""


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
        return self._connection.decode(self.outcome)


class ZmqConnection(Connection):
    def __init__(self, where: Endpoint, keys: ClientKeys | None, codec: Codec, options: ZmqOptions) -> None:
        self._where = where
        self._endpoint = where.text
        self._keys = keys
        self._codec = codec
        self._options = options
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        # Held for moments only, never while a socket is used; it guards the next four.
        self._state = threading.RLock()
        self._changed = threading.Condition(self._state)
        self._led = False
        self._closed = False
        self._pending: dict[int, ZmqPending] = {}
        self._outbox: deque[tuple[ZmqPending, bytes, Sequence[Buffer]]] = deque()
        # Ends the leader's wait for the sockets.
        self._wakeup = Wakeup()
        # The leader's.
        self._dealer: Dealer | None = None

    def submit(self, request: Envelope, timeout: float) -> ZmqPending:
        deadline = deadline_after(timeout)
        if os.getpid() != self._process:
            raise PeerGone(f"this connection to {self._endpoint} belongs to the process that this one forked from")
        pending = ZmqPending(self, next(self._numbers), timeout, deadline)
        frame = self._encode(request, pending)
        if len(self._pending) >= self._options.max_pending:
            self._make_room()
        with self._state:
            if self._closed:
                raise PeerGone(f"this connection to {self._endpoint} was closed")
            if len(self._pending) >= self._options.max_pending:
                limit = f"{self._options.max_pending} requests under way, as many as max_pending allows"
                raise Busy(f"this connection to {self._endpoint} has {limit}")
            self._pending[pending.number] = pending
            self._outbox.append((pending, frame, request.payload))
        self._flush()
        if self._outbox:  # another thread leads, and may be asleep
            self._wakeup.notify()
        return pending

    def close(self) -> None:
        if os.getpid() != self._process:  # the leader may be a thread that the fork does not have
            return
        with self._state:
            self._closed = True
            self._settle_all(f"this connection to {self._endpoint} was closed")
        while not self._take_lead():
            self._wakeup.notify()
            with self._state:
                self._changed.wait_for(lambda: not self._led)
        try:
            self._drop_dealer()
        finally:
            self._step_down()

    # For ZmqPending.

    def progress(self, pending: ZmqPending) -> None:
        """Do what can be done for ``pending`` without waiting."""
        if self._take_lead():
            try:
                self._send()
                self._check_server()
                self._receive(pending)
            finally:
                self._step_down()
        self._expire_if_late(pending)

    def wait_for(self, pending: ZmqPending) -> None:
        """Lead until ``pending`` is answered, or follow until the leader answers a request or steps down."""
        if self._take_lead():
            try:
                self._lead_until_answered(pending)
            finally:
                self._step_down()
            return
        with self._state:
            if self._led and pending.outcome is None:
                self._changed.wait(pending.deadline - time.monotonic())
        self._expire_if_late(pending)

    def decode(self, outcome: Answer | BlendHubError) -> Envelope:
        """The reply; raises if the outcome is an error."""
        if isinstance(outcome, BlendHubError):
            raise outcome
        header, message, payload = outcome
        if header.kind == frames.ERROR:
            raise frames.decode_error(message)
        frames.check_versions(header, self._codec.version, reader="the client", writer="the server")
        return Envelope(self._codec.decode(message), payload)

    # Taking turns.

    def _take_lead(self) -> bool:
        """Whether this thread leads from now on; if so, it must call ``_step_down``."""
        with self._state:
            if self._led:
                return False
            self._led = True
            return True

    def _step_down(self) -> None:
        """Let a follower lead, and send what was queued too late for this leader to see."""
        self._release_lead()
        self._flush()

    def _flush(self) -> None:
        """Send what is queued, unless another thread leads: that one will."""
        while self._outbox and self._take_lead():
            try:
                self._send()
            finally:
                self._release_lead()

    def _release_lead(self) -> None:
        with self._state:
            self._led = False
            self._changed.notify_all()

    # Only the leader calls these.

    def _lead_until_answered(self, pending: ZmqPending) -> None:
        while True:
            self._send()
            self._receive(pending)
            self._expire_if_late(pending)
            if pending.outcome is not None:
                return
            if self._connected().wait(pending.deadline - time.monotonic()):
                self._check_server()

    def _connected(self) -> Dealer:
        if self._dealer is None:
            self._dealer = Dealer(self._where, self._options, self._keys, self._wakeup)
        return self._dealer

    def _drop_dealer(self) -> None:
        if self._dealer:
            self._dealer.close()
            self._dealer = None

    def _send(self) -> None:
        """Send what is in the outbox."""
        if self._outbox:
            self._check_server()
        while self._outbox:
            pending, frame, payload = self._outbox.popleft()
            if pending.outcome is not None:
                continue
            try:
                frames.send(self._connected().socket, frame, payload)
            except zmq.Again:
                self._settle(
                    pending, Busy(f"{HIGH_WATER_MARK} messages to {self._endpoint} are not sent yet; try again later")
                )

    def _receive(self, pending: ZmqPending) -> None:
        """Settle what is answered, up to ``pending``: the answers behind it are for the next leader."""
        while pending.outcome is None and readable(self._connected().socket):
            frame, payload = frames.receive(self._connected().socket)
            try:
                header = frames.read_header(frame.buffer)
            except ProtocolError as error:
                log.warning("%s sent a frame that is not an answer: %s", self._endpoint, error)
                continue
            if answered := self._pending.get(header.number):
                self._settle(answered, (header, frames.message(frame.buffer), payload))

    def _check_server(self) -> None:
        """If the server is gone, end all requests, also those not sent yet, instead of waiting for its successor."""
        if self._dealer and (why := self._dealer.why_gone()):
            self._drop_dealer()
            self._settle_all(f"{why}; the request may or may not have been carried out")

    # Any thread may call these.

    def _encode(self, request: Envelope, pending: ZmqPending) -> bytes:
        codec, options = self._codec, self._options
        # Rounded up, so that a server on the same clock never ends the request before the caller does.
        timeout_ms = math.ceil(pending.timeout * 1000)
        message = codec.encode(request.message)
        frame = frames.request(codec.version, pending.number, message, timeout_ms, time.time())
        frames.check_sendable(frame, request.payload, options.max_frame_bytes)
        return frame

    def _settle(self, pending: ZmqPending, outcome: Answer | BlendHubError) -> None:
        """The first outcome counts."""
        with self._state:
            if self._pending.pop(pending.number, None):
                pending.outcome = outcome
                self._changed.notify_all()

    def _settle_all(self, why: str) -> None:
        with self._state:
            for pending in list(self._pending.values()):
                self._settle(pending, PeerGone(why))

    def _expire_if_late(self, pending: ZmqPending) -> None:
        if pending.outcome is None and time.monotonic() >= pending.deadline:
            path = self._where.path
            why = why_unreachable(path) or "is it overloaded?" if path else "does a hub run there, can it be reached?"
            sentence = f"{self._endpoint} did not answer within {pending.timeout:g} s; {why}"
            self._settle(pending, DeadlineExceeded(sentence))

    def _make_room(self) -> None:
        """Expire late requests that no thread waits for."""
        with self._state:
            pending = list(self._pending.values())
        for one in pending:
            self._expire_if_late(one)
