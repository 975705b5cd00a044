"""The server of the zmq transport: one ROUTER socket, read on the caller's event loop."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

import zmq

from blendhub.contracts.transport import Buffer, Envelope, Peer, Server, Service
from blendhub.core.errors import BlendHubError, ProtocolError
from blendhub_transports import frames
from blendhub_transports.admission import AcceptGate, ConnectionLimit
from blendhub_transports.dispatcher import Dispatcher, service_failure
from blendhub_transports.endpoints import parse_endpoint
from blendhub_transports.listener import Listener
from blendhub_transports.options import ZmqOptions
from blendhub_transports.peer_table import PeerTable
from blendhub_transports.sockets import (
    ACCEPT_FAILED,
    ACCEPTED,
    DISCONNECTED,
    HANDSHAKE_REFUSED,
    Receiver,
    pid_of_peer,
    read_monitor_event,
    readable,
)

log = logging.getLogger("blendhub.transports")


class ZmqServer(Server):
    """Reads requests from the listener's ROUTER, has them dispatched, and writes the replies."""

    def __init__(self, listener: Listener, service: Service, options: ZmqOptions, *, shares_clock: bool) -> None:
        """``shares_clock``: no client can be on another machine."""
        self.endpoint = listener.endpoint
        self.refused = 0
        self._listener = listener
        self._router = listener.router
        self._codec = service.codec
        self._options = options
        self._shares_clock = shares_clock
        self._dispatcher = Dispatcher(service, options.max_pending, listener.endpoint)
        self._peers = PeerTable()
        where = parse_endpoint(listener.endpoint)
        self._admission = ConnectionLimit(where, options.max_connections)
        self._gate = AcceptGate(where)
        self._events = Receiver(listener.monitor, self._read_monitor_event, self._schedule_departures)
        self._requests = Receiver(listener.router, self._read_request, self._report_departures)
        self._closing: asyncio.Future[None] | None = None

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        # In this order: a closing server reads no more requests, but its last replies still leave.
        self._requests.close()
        self._events.close()
        self._gate.close()
        await self._dispatcher.close()
        await self._listener.close()

    # Requests and replies.

    def _read_request(self) -> None:
        routing_id = self._router.recv(frames.LAST)
        first, payload = frames.receive(self._router, frames.MOST_PAYLOAD_FRAMES)
        peer = self._peers.find(routing_id) or self._add_peer(routing_id, first)
        try:
            header = frames.read_header(first.buffer)
            if header.kind != frames.REQUEST:
                raise ProtocolError(f"a frame of kind {header.kind} is not a request")
        except ProtocolError as error:
            # Without a header there is no request number to answer to.
            self._refuse(error)
            return
        reply = partial(self._reply, routing_id, header.number)
        try:
            request = self._decode(header, first.buffer, payload)
        except ProtocolError as error:
            self._refuse(error)
            reply(error)
            return
        self._dispatcher.dispatch(peer, request, self._remaining(header), reply)

    def _decode(self, header: frames.FrameHeader, frame: memoryview, payload: list[memoryview]) -> Envelope:
        """The request in these frames; raises ProtocolError if the options or the codec do not allow it."""
        frames.check_versions(header, self._codec.version, reader="the server", writer="the client")
        frames.check_frames(frame, payload, self._options.max_frame_bytes)
        return Envelope(self._codec.decode(frames.message(frame)), payload)

    def _remaining(self, header: frames.FrameHeader) -> float:
        """Seconds that the caller still waits for the reply."""
        remaining = header.timeout_ms / 1000
        if self._shares_clock:
            # Time in ZeroMQ's queues, while the loop was busy with other work, counts.
            remaining -= max(0.0, time.time() - header.sent)
        return remaining

    def _reply(self, routing_id: bytes, number: int, outcome: Envelope | BlendHubError) -> None:
        """Answer the request ``number`` of that client. A client that left, or does not read, loses the answer."""
        # Encoded and checked as a whole before the first frame leaves: half an answer cannot be taken back.
        frame, payload = self._encode(number, outcome)
        self._router.send(routing_id, frames.MORE)
        frames.send(self._router, frame, payload)
        self._requests.check()

    def _encode(self, number: int, outcome: Envelope | BlendHubError) -> tuple[bytes, Sequence[Buffer]]:
        version = self._codec.version
        if isinstance(outcome, Envelope):
            try:
                frame = frames.answer(version, number, frames.REPLY, self._codec.encode(outcome.message))
                frames.check_sendable(frame, outcome.payload, self._options.max_frame_bytes)
                return frame, outcome.payload
            except Exception as error:
                log.exception("%s: a reply of %s cannot be sent", self.endpoint, type(outcome.message).__name__)
                outcome = service_failure(error)
        return frames.answer(version, number, frames.ERROR, frames.encode_error(outcome)), ()

    def _refuse(self, reason: object) -> None:
        self.refused += 1
        log.debug("%s: refused: %s", self.endpoint, reason)

    # Peers that connect and leave.

    def _add_peer(self, routing_id: bytes, frame: zmq.Frame) -> Peer:
        while readable(self._listener.monitor):
            self._read_monitor_event()
        descriptor = frame.get(zmq.SRCFD)
        peer = self._peers.add(routing_id, descriptor)
        self._admission.has_asked(descriptor)
        pid = pid_of_peer(descriptor)
        if pid is not None:
            self._dispatcher.peer_met(peer, pid)
        return peer

    def _read_monitor_event(self) -> None:
        event, value = read_monitor_event(self._listener.monitor)
        if event == ACCEPTED:
            n_refused = 0
            try:
                self._peers.connected(value)
                n_refused = self._admission.connected(value)
                self.refused += n_refused
            finally:  # the gate would stay shut for all clients
                self._gate.open_again(refusing=bool(n_refused))
        elif event == ACCEPT_FAILED:  # such as at a limit of the whole machine: the next attempt may fail, too
            self._gate.open_again(refusing=True)
        elif event == DISCONNECTED:
            self._peers.disconnected(value)
            self._admission.disconnected(value)
        elif event & HANDSHAKE_REFUSED:
            self._refuse("a handshake")

    def _schedule_departures(self) -> None:
        # The service learns that a peer left only after all of the peer's requests are read.
        if self._peers.any_left:
            self._requests.schedule()

    def _report_departures(self) -> None:
        if self._peers.any_left:
            for peer in self._peers.take_left():
                self._dispatcher.peer_gone(peer)
