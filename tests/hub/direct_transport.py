"""A transport from real clients to a ``DirectHub``, on which a test can lose requests and replies."""

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.contracts import Envelope
from blendhub.contracts.transport import Connection, Pending
from blendhub.core.errors import BlendHubError, DeadlineExceeded, PeerGone
from blendhub.system.processes import ProcessId
from tests.hub.hub_direct import DirectHub

HARDLY_S = 0.005
"""The timeout of clients, and so how long they wait for writes that do not end."""


class Line(Enum):
    """What happens to a client's requests and their replies."""

    GOOD = 0
    REPLIES_ARE_LOST = 1
    """The hub executes requests, but the client does not receive the replies."""
    CUT = 2
    REGISTRATIONS_ARE_LOST = 3
    """Only the replies to registrations are lost."""


class Answered(Pending):
    def __init__(self, outcome: Envelope | BlendHubError) -> None:
        self._outcome = outcome

    def done(self, within: float = 0.0) -> bool:
        return True

    def result(self) -> Envelope:
        if isinstance(self._outcome, BlendHubError):
            raise self._outcome
        return self._outcome


class DirectConnection(Connection):
    """The connection of one client, which claims to be a process that the test may kill."""

    _numbers = itertools.count(1)

    def __init__(self, hub: DirectHub, process: ProcessId) -> None:
        self.hub = hub
        self.process = process
        self.line = Line.GOOD
        self.peer = b"client-%d" % next(self._numbers)
        self._codec = wire.client_codec()

    def submit(self, request: Envelope, timeout: float) -> Pending:
        message: Any = request.message
        if self.line is Line.CUT:
            return Answered(PeerGone("the line is cut"))
        if isinstance(message, wire.Register):
            message = msgspec.structs.replace(message, process=self.process)
        outcome: Envelope | BlendHubError
        try:
            answer = self.hub.envelope(message, request.payload, self.peer)
            outcome = Envelope(self._codec.decode(self.hub.service.codec.encode(answer.message)), answer.payload)
        except BlendHubError as error:
            outcome = error
        registers = isinstance(message, wire.Register)
        if self.line is Line.REPLIES_ARE_LOST or (self.line is Line.REGISTRATIONS_ARE_LOST and registers):
            return Answered(DeadlineExceeded("the reply is lost"))
        return Answered(outcome)

    def cut(self) -> None:
        """The hub sees the end of the connection; the next connection is a new peer."""
        self.hub.service.gone(self.peer)
        self.peer = b"client-%d" % next(self._numbers)

    def close(self) -> None:
        if self.line is not Line.CUT:
            self.cut()


def connect(hub: DirectHub, process: ProcessId, clock: Callable[[], float]) -> tuple[HubClient, DirectConnection]:
    """A client without a background thread."""
    connection = DirectConnection(hub, process)

    class Transports:
        def create(self, *_: Any) -> Any:
            return self

        def connect(self, *_: Any) -> Connection:
            return connection

    host: Any = Transports()
    return HubClient("", host=host, timeout=HARDLY_S, clock=clock, background=False), connection
