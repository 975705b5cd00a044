"""What servers of frames share: a request is read from its frames, run, and answered with frames."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from blendhub.contracts.transport import Buffer, Envelope, Peer, Server, Service
from blendhub.core.errors import BlendHubError, ProtocolError
from blendhub_transports import frames
from blendhub_transports.dispatcher import Dispatcher, Outcome, service_failure

log = logging.getLogger("blendhub.transports")

Send: TypeAlias = Callable[[list[Buffer]], None]
"""Sends an answer's frames to the caller, without waiting for the caller."""


class FrameServer(Server):
    """Everything happens on the event loop that made the server. A subclass reads and writes frames."""

    def __init__(self, endpoint: str, service: Service, max_pending: int) -> None:
        self.endpoint = endpoint
        self.refused = 0
        self._codec = service.codec
        self.dispatcher = Dispatcher(service, max_pending, endpoint)

    def refuse(self, reason: object) -> None:
        self.refused += 1
        log.debug("%s: refused: %s", self.endpoint, reason)

    def take(self, peer: Peer, received: Sequence[memoryview], send: Send) -> None:
        """Have the request in these frames answered, or refuse what is none."""
        header = None
        try:
            header = frames.read_header(received[0] if received else memoryview(b""))
            request = frames.decode(header, received, self._codec, reader="the server", writer="the client")
            if header.kind != frames.REQUEST:
                raise ProtocolError(f"a frame of kind {header.kind} is not a request")
        except BlendHubError as error:
            self.refuse(error)
            if header:
                self._reply(send, header.number, error)
        else:
            self.dispatcher.dispatch(peer, request, header.deadline, partial(self._reply, send, header.number))

    def _reply(self, send: Send, number: int, outcome: Outcome) -> None:
        version = self._codec.version
        if isinstance(outcome, Envelope):
            try:
                message = self._codec.encode(outcome.message)
                parts = frames.encode(version, frames.REPLY, number, 0.0, message, outcome.payload)
            except Exception as error:
                log.exception("%s: a reply of %s cannot be sent", self.endpoint, type(outcome.message).__name__)
                outcome = service_failure(error)
        if not isinstance(outcome, Envelope):
            parts = frames.encode(version, frames.ERROR, number, 0.0, frames.encode_error(outcome))
        send(parts)
