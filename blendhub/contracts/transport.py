"""The contract of a transport: on one machine, requests one way, replies or typed errors back, all by the deadline."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from blendhub.core.errors import InvalidInput, ProtocolError

Buffer: TypeAlias = bytes | bytearray | memoryview
Peer: TypeAlias = bytes
"""The name of one connection to a server. No other connection has it, by whichever server of a service it comes."""


class Envelope(NamedTuple):
    """A message, and raw buffers that travel with it without being encoded."""

    message: msgspec.Struct
    payload: Sequence[Buffer] = ()


class Codec:
    """Turns messages to bytes and back. Each side has one: what it sends differs from what it receives.

    Decoding accepts only the structs it was made for, and raises ProtocolError on anything else.
    """

    def __init__(self, receives: Any, *, version: int) -> None:
        self.version = version
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)

    def encode(self, message: msgspec.Struct) -> bytes:
        try:
            return self._encoder.encode(message)
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON may bring
            raise InvalidInput(f"a message has a text that is not valid: {error}") from None

    def decode(self, frame: Buffer) -> Any:
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a message does not decode: {error}") from None


class Service(ABC):
    """The requests that a server answers. Every method is called on the event loop that ``serve`` was called on."""

    codec: Codec
    """Decodes requests, encodes replies."""

    @abstractmethod
    def handle(self, peer: Peer, request: Envelope) -> "Envelope | Awaitable[Envelope]":
        """Answer one request, at once or later; raises (or the awaitable raises) to answer with an error.

        A BlendHubError reaches the caller as the same class with the same sentence; any other exception
        reaches it as ServiceFailed, and the server lives on.
        """

    def gone(self, peer: Peer) -> None:  # noqa: B027  most services need not know
        """A peer closed its connection or died. A transport that cannot notice this never calls it."""


class Pending(ABC):
    """A request under way."""

    @abstractmethod
    def done(self, within: float = 0.0) -> bool:
        """Whether ``result`` would return or raise at once. Waits for that, but no longer than ``within`` seconds."""

    @abstractmethod
    def result(self) -> Envelope:
        """Wait for the reply until the request's deadline; raises the error it was answered with."""


class Connection(ABC):
    """A client's end.

    *Deadlines.* Every request ends by its deadline, with its reply or with a typed error:
    DeadlineExceeded when time ran out, PeerGone when the server died or left meanwhile (as soon as the
    transport notices, not at the deadline) or none is there, Busy when too many requests are under way,
    VersionMismatch when the two sides' codecs differ, ProtocolError for what cannot be a message.

    *Order.* Replies may come in any order; each finds its own request.

    *Reconnecting.* After the server went away, new requests work as soon as a server is back. Those that were
    under way are not sent again.

    *Threads.* All methods may be called from several threads at once. A forked process makes its own.
    """

    @abstractmethod
    def submit(self, request: Envelope, timeout: float) -> Pending:
        """Send a request, which has ``timeout`` seconds, without waiting for the server.

        The buffers of the payload stay as they are until the reply.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection; requests under way end with PeerGone. Closing twice is fine."""


class Server(ABC):
    """A service that listens at an endpoint."""

    endpoint: str
    """Where clients connect."""

    refused: int
    """Frames that were answered with an error or dropped because they are not valid requests."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening, cancel what is under way, and leave nothing behind (socket files, threads)."""


class Transport(ABC):
    """Carries requests between processes, or within one.

    *Hostile input.* Whatever bytes arrive, the server lives on: a frame that is malformed, too large, or of
    another version is counted in ``Server.refused`` and answered with a typed error if it says which request it is.

    *Bounds.* A server holds at most a bounded number of requests of a connection; one more is answered Busy at once.

    *Slow readers.* A peer that does not read its replies may lose them, and never blocks others.

    *Trust.* Only processes of this user can reach an endpoint. What stands behind it trusts them.

    The capability ``one_process`` says that a server and its clients are in one process.
    """

    schemes: tuple[str, ...]
    """Prefixes of the endpoints that it supports, such as ``ipc://``."""

    @abstractmethod
    async def serve(self, endpoint: str, service: Service) -> Server:
        """Listen at ``endpoint``; ``service`` is called on the running event loop.

        Raises InvalidInput if a server listens there already.
        """

    @abstractmethod
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        """A connection to a server, which need not run yet. ``codec`` decodes replies, encodes requests."""

    def private_endpoint(self, directory: Path) -> str:
        """An endpoint in ``directory``, which is empty, and which only this user can enter.

        The default is for a transport whose first scheme is followed by a path.
        """
        return f"{self.schemes[0]}{directory}/hub.sock"
