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
from blendhub_transports.dispatcher import Dispatcher
from blendhub_transports.error_codec import encode_error, service_failure
from blendhub_transports.listener import Listener
from blendhub_transports.options import ZmqOptions
from blendhub_transports.peer_table import PeerTable
from blendhub_transports.receiver import AT_ONCE, Receiver
from blendhub_transports.reply_writer import ReplyWriter
from blendhub_transports.sockets import ACCEPTED, DISCONNECTED, HANDSHAKE_REFUSED, read_monitor_event

log = logging.getLogger("blendhub.transports")


class ZmqServer(Server):
    """Answers what comes through ``listener``."""

    def __init__(self, listener: Listener, service: Service, options: ZmqOptions, *, shares_clock: bool) -> None:
        """``shares_clock`` where no client can be on another machine."""
        self.endpoint = listener.endpoint
        self.refused = 0
        self._listener = listener
        self._router = listener.router
        self._writer = ReplyWriter(listener.router)
        self._service = service
        self._options = options
        self._shares_clock = shares_clock
        self._dispatcher = Dispatcher(service, options.max_pending, listener.endpoint)
        self._peers = PeerTable()
        self._news = Receiver(listener.monitor, self._read_monitor_event, self._ask_who_left)
        self._requests = Receiver(
            listener.router, self._read_request, self._say_who_left, self._writer.flush, self._may_linger
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
        await self._dispatcher.close()
        await self._listener.close()

    def _read_request(self, flags: int) -> None:
        options = self._options
        routing_id = self._router.recv(flags)
        first, payload = frames.receive(self._router, frames.LAST, options.max_payload_frames)
        peer = self._peers.peer(routing_id) or self._welcome(routing_id, first)
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
        self._dispatcher.take(peer, Envelope(message, payload), remaining, answer)

    def _answer(self, routing_id: bytes, asked: frames.Header, outcome: Envelope | BlendHubError) -> None:
        """Send a reply or an error. A peer that is gone, or does not read, loses it."""
        frame, payload = self._encoded(asked.number, outcome)
        if asked.patient and not payload and self._requests.reading:
            self._writer.hold(routing_id, frame)
            return
        self._writer.send(routing_id, frame, payload)
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
        return frames.answer(codec.version, number, frames.ERROR, encode_error(outcome)), ()

    def _may_linger(self) -> bool:
        return not self._writer.held and self._dispatcher.idle()

    def _refuse(self, reason: object) -> None:
        self.refused += 1
        log.debug("%s: refused: %s", self.endpoint, reason)

    def _welcome(self, routing_id: bytes, frame: zmq.Frame) -> Peer:
        while self._listener.monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._read_monitor_event(AT_ONCE)
        return self._peers.speaks(routing_id, frame.get(zmq.SRCFD))

    def _read_monitor_event(self, flags: int) -> None:
        event, value = read_monitor_event(self._listener.monitor, flags)
        if event == ACCEPTED:
            self._peers.accepted(value)
        elif event == DISCONNECTED:
            self._peers.left(value)
        elif event & HANDSHAKE_REFUSED:
            self._refuse("a handshake")

    def _ask_who_left(self) -> None:
        # Only when all its requests are read may the service hear that a peer is gone.
        if self._peers.leaving:
            self._requests.rouse()

    def _say_who_left(self) -> None:
        if self._peers.leaving:
            for peer in self._peers.drained():
                self._dispatcher.gone(peer)
