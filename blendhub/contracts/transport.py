"""The contract of a transport: requests one way, replies or typed errors back, always by the deadline."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from blendhub.core.errors import InvalidInput, ProtocolError, Unsupported

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
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
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

    def met(self, peer: Peer, pid: int) -> None:  # noqa: B027  most services need not know
        """Called before a peer's first request by a transport that learns from the kernel which process it is.

        ``pid`` is as this process sees it. No peer can choose it.
        """

    def gone(self, peer: Peer) -> None:  # noqa: B027  most services need not know
        """A peer closed its connection or died. A transport that cannot notice this never calls it."""


class Pending(ABC):
    """A request under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether ``result`` would return or raise at once. Never blocks; makes progress by being called."""

    @abstractmethod
    def result(self) -> Envelope:
        """Wait for the reply until the request's deadline; raises the error it was answered with."""


class Connection(ABC):
    """A client's end.

    *Deadlines.* Every request ends by its deadline, with its reply or with a typed error:
    DeadlineExceeded when time ran out, PeerGone when the server died or left meanwhile (as soon as the
    transport notices, not at the deadline), Busy when the server's or the connection's queue is full,
    VersionMismatch when the two sides' codecs differ, ProtocolError for what cannot be a message.

    *Order.* Replies may come in any order; each finds its own request.

    *Reconnecting.* After the server went away, the connection tries again by itself, with growing pauses up
    to a second. Requests that were under way are not sent again; new ones work once the server is back.

    *Threads.* All methods may be called from several threads at once. A forked process makes its own.
    """

    @abstractmethod
    def submit(self, request: Envelope, timeout: float) -> Pending:
        """Send a request without waiting for the reply. ``timeout`` is in seconds from now."""

    def call(self, request: Envelope, timeout: float) -> Envelope:
        """Send a request and wait for its reply."""
        return self.submit(request, timeout).result()

    @abstractmethod
    def close(self) -> None:
        """End the connection; requests under way end with PeerGone. Closing twice is fine."""


class Server(ABC):
    """A service that listens at an endpoint."""

    endpoint: str
    """Where clients connect: the endpoint asked for, with the port that was picked if it was 0."""

    refused: int
    """Frames that were answered with an error or dropped because they are not valid requests."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening, cancel what is under way, and leave nothing behind (socket files, threads)."""


class KeyFiles(msgspec.Struct, frozen=True):
    """Keys that ``make_keys`` has written, and the options of the transport that use them."""

    files: tuple[Path, ...]
    server_options: dict[str, str]
    client_options: dict[str, str]


class Transport(ABC):
    """Carries requests between processes, or within one.

    *Hostile input.* Whatever bytes arrive, the server lives on: a frame that is malformed, too large, or of
    another version is counted in ``Server.refused`` and answered with a typed error if it says which request it is.

    *Bounds.* A server holds at most a bounded number of requests; one more is answered Busy at once. A peer
    that does not read its replies loses them, and never blocks others.

    *Trust.* An endpoint that only this user can reach needs no keys; one that others can reach is refused
    at ``serve`` unless the transport's options hold keys, with an error that says how to make them.

    *Capabilities.* ``one_process``: a server and its clients are in one process.
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
        """An endpoint that needs no keys. ``directory`` is empty, and only this user can enter it.

        The default is for a transport whose first scheme is followed by a path. One that has only ports answers with a
        loopback address and port 0.
        """
        return f"{self.schemes[0]}{directory}/hub.sock"

    def make_keys(self, directory: Path) -> KeyFiles:
        """Write keys for a server and its clients into ``directory``; existing files are never overwritten.

        Raises InvalidInput if the files exist or cannot be written. Only transports that reach other machines need it.
        """
        raise Unsupported("this transport needs no keys; it does not reach other machines")

    def client_options(self, endpoint: str) -> dict[str, str]:
        """The options that a client needs to reach the server that this transport, with its options, runs there.

        Files among them are named as ``make_keys`` names them, beside those that this transport's options name.
        """
        return {}
