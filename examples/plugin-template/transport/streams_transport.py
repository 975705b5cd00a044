"""The transport ``streams``: asyncio's streams over a Unix socket, and nothing but the standard library and msgspec."""

import asyncio
import inspect
import itertools
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub import PluginSpec, errors, hookimpl
from blendhub.contracts import Codec, Connection, Envelope, Pending, Server, Service, Transport
from blendhub.core.errors import (
    BlendHubError,
    Busy,
    DeadlineExceeded,
    InvalidInput,
    PeerGone,
    ProtocolError,
    VersionMismatch,
)

log = logging.getLogger(__name__)
SCHEME = "streams://"
LENGTH = struct.Struct("<I")
MOST_BYTES = 2**27
"""The most bytes of a frame, and those that wait for a client that does not read. It loses the replies beyond."""
LINGER_S = 0.2
ERRORS = {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BlendHubError)}


class StreamsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_pending: Annotated[int, Meta(ge=1, le=2**20, description="requests under way of one connection")] = 1024


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A request, or its answer; its length stands before it."""

    version: int
    number: int
    """Given to a request by its connection, and repeated in the answer."""
    message: bytes
    payload: tuple[bytes, ...] = ()
    timeout: Annotated[float, Meta(ge=0, le=2**31)] = 0.0
    """How long the caller of a request waits."""
    error: str = ""
    """The class of an error, whose sentence the message is."""


def encode(frame: Frame) -> bytes:
    data = msgspec.msgpack.encode(frame)
    if len(data) > MOST_BYTES:
        raise ProtocolError(f"a frame of {len(data)} bytes, but at most {MOST_BYTES} are allowed")
    return LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """The next frame; raises ProtocolError for what cannot be one, EOFError where the other side left."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MOST_BYTES:
            raise ProtocolError(f"a frame of {length} bytes, but at most {MOST_BYTES} are allowed")
        return msgspec.msgpack.decode(await reader.readexactly(length), type=Frame)
    except asyncio.IncompleteReadError as error:
        raise ProtocolError("the beginning of a frame") if error.partial else EOFError from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a frame does not decode: {error}") from None


class StreamsServer(Server):
    def __init__(self, endpoint: str, service: Service, max_pending: int) -> None:
        self.endpoint, self.refused = endpoint, 0
        self._path, self._service, self._max_pending = _path(endpoint), service, max_pending
        self._names = (secrets.token_bytes(8) + number.to_bytes(8) for number in itertools.count())
        self._answering: dict[asyncio.Future[None], bytes] = {}
        """The requests under way, and their peers."""
        self._clients: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            listener.connect(str(self._path))
            raise InvalidInput(f"a server already listens at {self._path}; stop it or choose another endpoint")
        try:
            if self._path.is_socket():  # of a server that died
                self._path.unlink()
            listener.bind(str(self._path))
        except OSError as error:
            raise InvalidInput(f"no server can listen at {self._path}: {error.strerror}") from None
        self._path.chmod(0o600)  # before it listens, nobody can connect
        self._listener = await asyncio.start_unix_server(self._serve, sock=listener)

    async def close(self) -> None:
        if self._listener.is_serving():
            self._listener.close()
            self._path.unlink(missing_ok=True)
            for task in self._answering:
                task.cancel()
            for writer in self._clients:
                writer.close()
            until = time.monotonic() + LINGER_S
            while (self._answering or self._clients) and time.monotonic() < until:
                await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a connection until it ends."""
        peer = next(self._names)
        self._clients.add(writer)
        try:
            while True:
                self._take(peer, await read_frame(reader), writer)
        except (ProtocolError, EOFError, OSError) as error:
            # After a malformed frame it is not known where the next one begins.
            self.refused += isinstance(error, ProtocolError)
        finally:
            self._clients.discard(writer)
            writer.close()
            self._service.gone(peer)

    def _take(self, peer: bytes, frame: Frame, writer: asyncio.StreamWriter) -> None:
        codec = self._service.codec
        try:
            if frame.version != codec.version:
                raise VersionMismatch(f"the client speaks version {frame.version}, the server {codec.version}")
            request = Envelope(codec.decode(frame.message), frame.payload)
        except BlendHubError as error:
            self.refused += 1
            return self._answer(writer, frame.number, error)
        try:
            if sum(other == peer for other in self._answering.values()) >= self._max_pending:
                raise Busy(f"{self.endpoint} has {self._max_pending} requests of this connection under way")
            answer = self._service.handle(peer, request)
        except Exception as error:
            return self._answer(writer, frame.number, error)
        if isinstance(answer, Envelope):
            return self._answer(writer, frame.number, answer)
        task = asyncio.ensure_future(self._answer_later(writer, frame, answer))
        self._answering[task] = peer
        return task.add_done_callback(self._answering.pop)

    async def _answer_later(self, writer: asyncio.StreamWriter, frame: Frame, answer: Awaitable[Envelope]) -> None:
        outcome: Envelope | Exception
        try:
            async with asyncio.timeout(frame.timeout):
                outcome = await answer
        except TimeoutError:
            outcome = DeadlineExceeded(f"{self.endpoint}: cancelled at the request's deadline")
        except Exception as error:
            outcome = error
        self._answer(writer, frame.number, outcome)

    def _answer(self, writer: asyncio.StreamWriter, number: int, outcome: Envelope | Exception) -> None:
        version = self._service.codec.version
        if isinstance(outcome, Envelope):
            message = self._service.codec.encode(outcome.message)
            frame = Frame(version, number, message, tuple(map(bytes, outcome.payload)))
        else:
            if not isinstance(outcome, BlendHubError):
                log.error("%s: the service failed", self.endpoint, exc_info=outcome)
                outcome = errors.ServiceFailed(f"the service raised {type(outcome).__name__}: {outcome}")
            name = next(kind.__name__ for kind in type(outcome).__mro__ if ERRORS.get(kind.__name__) is kind)
            frame = Frame(version, number, str(outcome).encode(), error=name)
        if writer.transport.get_write_buffer_size() <= MOST_BYTES:
            writer.write(encode(frame))


class StreamsPending(Pending):
    def __init__(self, path: Path, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout
        self._late = DeadlineExceeded(f"{path} did not answer within {timeout:g} s")
        self._outcome: Future[Envelope] = Future()

    def settle(self, outcome: Envelope | BlendHubError) -> None:
        """The first outcome counts."""
        with suppress(InvalidStateError):
            if isinstance(outcome, Envelope):
                self._outcome.set_result(outcome)
            else:
                self._outcome.set_exception(outcome)

    def done(self, within: float = 0.0) -> bool:
        left = max(0.0, self._deadline - time.monotonic())
        try:
            self._outcome.exception(min(within, left))
        except TimeoutError:
            if left <= within:
                self.settle(self._late)
        return self._outcome.done()

    def result(self) -> Envelope:
        self.done(float("inf"))
        return self._outcome.result()


class StreamsConnection(Connection):
    """A thread with an event loop connects, sends and receives; callers only wait."""

    def __init__(self, path: Path, codec: Codec, max_pending: int) -> None:
        self._path, self._codec, self._max_pending = path, codec, max_pending
        self._numbers = itertools.count(1)
        self._pending: dict[int, StreamsPending] = {}
        self._process = os.getpid()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        threading.Thread(target=self._loop.run_forever, name="streams-transport", daemon=True).start()

    def submit(self, request: Envelope, timeout: float) -> Pending:
        if os.getpid() != self._process or self._is_closed:
            raise PeerGone(f"this connection to {self._path} was closed, or belongs to the process before the fork")
        if len(self._pending) >= self._max_pending:
            raise Busy(f"this connection to {self._path} has {self._max_pending} requests under way")
        pending, number = StreamsPending(self._path, timeout), next(self._numbers)
        message = self._codec.encode(request.message)
        frame = Frame(self._codec.version, number, message, tuple(map(bytes, request.payload)), timeout)
        self._pending[number] = pending
        asyncio.run_coroutine_threadsafe(self._send(number, encode(frame)), self._loop)
        return pending

    def close(self) -> None:
        if os.getpid() == self._process and not self._is_closed:
            self._is_closed = True
            self._fail_all(f"this connection to {self._path} was closed")
            if self._writer:
                self._loop.call_soon_threadsafe(self._writer.close)
            self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, self._loop.stop)

    # In the thread.

    async def _send(self, number: int, data: bytes) -> None:
        try:
            async with self._connecting:  # which keeps the order of requests
                if self._writer is None:
                    reader, self._writer = await asyncio.open_unix_connection(self._path)
                    self._reading = asyncio.ensure_future(self._read(reader, self._writer))
            self._writer.write(data)
        except OSError as error:
            if pending := self._pending.pop(number, None):
                pending.settle(PeerGone(f"no server answers at {self._path}: {error}"))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ProtocolError, EOFError, OSError):
            while True:
                self._settle(await read_frame(reader))
        self._writer = None
        writer.close()
        self._fail_all(f"the server at {self._path} left")

    def _settle(self, frame: Frame) -> None:
        if pending := self._pending.pop(frame.number, None):
            try:
                if frame.error:
                    raise ERRORS.get(frame.error, errors.ServiceFailed)(frame.message.decode(errors="replace"))
                pending.settle(Envelope(self._codec.decode(frame.message), frame.payload))
            except BlendHubError as error:
                pending.settle(error)

    def _fail_all(self, why: str) -> None:
        pending, self._pending = self._pending, {}
        for request in pending.values():
            request.settle(PeerGone(why))


class StreamsTransport(Transport):
    schemes = (SCHEME,)

    def __init__(self, options: StreamsOptions) -> None:
        self._max_pending = options.max_pending

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = StreamsServer(endpoint, service, self._max_pending)
        await server.listen()
        return server

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return StreamsConnection(_path(endpoint), codec, self._max_pending)


def _path(endpoint: str) -> Path:
    path = endpoint.removeprefix(SCHEME)
    if path == endpoint or not 0 < len(path.encode()) <= 107:
        raise InvalidInput(f"endpoint {endpoint!r} is not understood; expected {SCHEME}/PATH of at most 107 bytes")
    return Path(path)


@hookimpl
def blendhub_transports() -> list[PluginSpec[Transport]]:
    return [
        PluginSpec(
            name="streams",
            api=5,
            summary="requests between processes of one user, over asyncio's streams",
            factory=StreamsTransport,
            options=StreamsOptions,
        )
    ]
