"""The server's side of the zmq transport: one ROUTER socket, read on the caller's event loop."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

import zmq

from blendhub.contracts.transport import Buffer, Envelope, Peer, Server, Service
from blendhub.errors import BlendHubError, ProtocolError
from blendhub_transports import frames
from blendhub_transports.answers import Answers
from blendhub_transports.desk import Desk
from blendhub_transports.door import Door
from blendhub_transports.faults import encode_fault, service_failure
from blendhub_transports.inlet import AT_ONCE, Inlet
from blendhub_transports.options import ZmqOptions
from blendhub_transports.roster import Roster
from blendhub_transports.sockets import CAME, LEFT, REFUSED, read_news

log = logging.getLogger("blendhub.transports")


class ZmqServer(Server):
    """Answers what comes through ``door``."""

    def __init__(self, door: Door, service: Service, options: ZmqOptions, *, shares_clock: bool) -> None:
        """``shares_clock`` where no client can be on another machine."""
        self.endpoint = door.endpoint
        self.refused = 0
        self._door = door
        self._router = door.router
        self._answers = Answers(door.router)
        self._service = service
        self._options = options
        self._shares_clock = shares_clock
        self._desk = Desk(service, options.max_pending, door.endpoint)
        self._roster = Roster()
        self._news = Inlet(door.monitor, self._read_news, self._ask_who_left)
        self._requests = Inlet(
            door.router, self._read_request, self._say_who_left, self._answers.flush, self._may_linger
        )
        self._closing: asyncio.Future[None] | None = None

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # In this order: what is closing reads no more, but its last answers still leave.
        self._requests.close()
        self._news.close()
        await self._desk.close()
        await self._door.close()

    def _read_request(self, flags: int) -> None:
        options = self._options
        routing_id = self._router.recv(flags)
        first, payload = frames.receive(self._router, frames.LAST, options.max_payload_frames)
        peer = self._roster.peer(routing_id) or self._welcome(routing_id, first)
        frame = first.buffer
        try:
            header = frames.read_header(frame)
            if header.kind != frames.REQUEST:
                raise ProtocolError(f"a frame of kind {header.kind} is no request")
        except ProtocolError as error:
            # Without a header nobody can be told which request this answers.
            self._refuse(error)
            return
        answer = partial(self._answer, routing_id, header)
        codec = self._service.codec
        try:
            frames.check_versions(header, codec.version, reader="the server", writer="the client")
            frames.check_frames(frame, payload, options.max_frame_bytes, options.max_payload_frames)
            message = codec.decode(frames.only_message(frame, header))
        except ProtocolError as error:
            self._refuse(error)
            answer(error)
            return
        remaining = header.timeout_ms / 1000
        if self._shares_clock:
            # What it spent in ZeroMQ's queues, while the loop was busy with others, counts.
            remaining -= max(0.0, time.time() - header.sent)
        self._desk.take(peer, Envelope(message, payload), remaining, answer)

    def _answer(self, routing_id: bytes, asked: frames.Header, outcome: Envelope | BlendHubError) -> None:
        """Send a reply or an error. A peer that is gone, or does not read, loses it."""
        frame, payload = self._encoded(asked.number, outcome)
        if asked.patient and not payload and self._requests.reading:
            self._answers.hold(routing_id, frame)
            return
        self._answers.send(routing_id, frame, payload)
        self._requests.look()

    def _encoded(self, number: int, outcome: Envelope | BlendHubError) -> tuple[bytes, Sequence[Buffer]]:
        """The frame and the payload of an answer, known to be sendable before the first is sent."""
        codec, options = self._service.codec, self._options
        if isinstance(outcome, Envelope):
            try:
                frame = frames.answer(codec.version, number, frames.REPLY, codec.encode(outcome.message))
                frames.check_sendable(frame, outcome.payload, options.max_frame_bytes, options.max_payload_frames)
                return frame, outcome.payload
            except Exception as error:
                log.exception("%s: a reply of %s cannot be sent", self.endpoint, type(outcome.message).__name__)
                outcome = service_failure(error)
        return frames.answer(codec.version, number, frames.FAULT, encode_fault(outcome)), ()

    def _may_linger(self) -> bool:
        return not self._answers.held and self._desk.idle()

    def _refuse(self, reason: object) -> None:
        self.refused += 1
        log.debug("%s: refused: %s", self.endpoint, reason)

    def _welcome(self, routing_id: bytes, frame: zmq.Frame) -> Peer:
        while self._door.monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._read_news(AT_ONCE)
        return self._roster.speaks(routing_id, frame.get(zmq.SRCFD))

    def _read_news(self, flags: int) -> None:
        event, value = read_news(self._door.monitor, flags)
        if event == CAME:
            self._roster.accepted(value)
        elif event == LEFT:
            self._roster.left(value)
        elif event & REFUSED:
            self._refuse("a handshake")

    def _ask_who_left(self) -> None:
        # Only when all its requests are read may the service hear that a peer is gone.
        if self._roster.leaving:
            self._requests.rouse()

    def _say_who_left(self) -> None:
        if self._roster.leaving:
            for peer in self._roster.drained():
                self._desk.gone(peer)
