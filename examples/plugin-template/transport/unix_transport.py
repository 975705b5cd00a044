"""The transport ``unix``: asyncio's streams over a Unix socket, and nothing but the standard library.

A frame is the length of a head, the head, and the payload behind it.
"""

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub import PluginSpec, errors, hookimpl
from blendhub.contracts import Codec, Connection, Envelope, Pending, Server, Service, Transport
from blendhub.contracts.transport import Buffer
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
SCHEME = "unix://"
LENGTH = struct.Struct("<I")
MAX_BYTES = 2**28
"""The most bytes of a head, and of a payload; a longer one ends the connection."""
MAX_UNSENT = 2**28
"""Bytes that wait for a client that does not read. It loses the replies beyond them."""
LONGEST_PAUSE_S = 1.0
LONGEST_WAIT_S = 2**31
KNOWN = {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BlendHubError)}


class UnixOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_pending: Annotated[
        int, Meta(ge=1, le=2**20, description="requests under way in one server, and in one connection")
    ] = 4096


class Head(msgspec.Struct, frozen=True, array_like=True):
    version: int
    number: int
    """Given to a request by its connection, and repeated in the answer."""
    message: bytes
    sizes: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    """The sizes of the payload's buffers."""
    seconds: float = 0.0
    """How long the caller of a request waits."""
    error: str = ""
    """The class of an error, whose sentence the message is."""


decode_head = msgspec.msgpack.Decoder(Head).decode


def frame(head: Head, payload: Sequence[Buffer] = ()) -> bytes:
    parts = [memoryview(buffer).tobytes() for buffer in payload]
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(head, sizes=tuple(map(len, parts))))
    if max(len(encoded), sum(map(len, parts))) > MAX_BYTES:
        raise ProtocolError(f"a message or its payload has more than {MAX_BYTES} bytes; send less at a time")
    return b"".join((LENGTH.pack(len(encoded)), encoded, *parts))


async def read_frame(reader: asyncio.StreamReader) -> tuple[Head, list[bytes]]:
    """The next frame; raises ProtocolError for what cannot be one."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_BYTES:
        raise ProtocolError(f"a head of {length} bytes, but at most {MAX_BYTES} are allowed")
    try:
        head = decode_head(await reader.readexactly(length))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a head does not decode: {error}") from None
    if sum(head.sizes) > MAX_BYTES:
        raise ProtocolError(f"a payload of {sum(head.sizes)} bytes, but at most {MAX_BYTES} are allowed")
    if not 0 <= head.seconds < LONGEST_WAIT_S:  # or no number at all
        raise ProtocolError(f"{head.seconds} seconds to wait, but they should be from 0 to {LONGEST_WAIT_S}")
    return head, [await reader.readexactly(size) for size in head.sizes]


class UnixServer(Server):
    def __init__(self, endpoint: str, service: Service, max_pending: int) -> None:
        self.endpoint, self.refused = endpoint, 0
        self._service, self._max_pending = service, max_pending
        self._name = secrets.token_hex(8).encode()
        self._numbers = itertools.count(1)
        self._answering: set[asyncio.Future[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._path: Path | None = None

    async def listen(self, path: Path) -> None:
        if _is_served(path):
            raise InvalidInput(f"a server already listens at {path}; stop it or choose another endpoint")
        listener = socket.socket(socket.AF_UNIX)
        try:
            if path.is_socket():  # of a server that died
                path.unlink()
            listener.bind(str(path))
        except OSError as error:
            listener.close()
            raise InvalidInput(
                f"no server can listen at {path}: {error.strerror}; it needs a directory of yours"
            ) from None
        path.chmod(0o600)  # before it listens, nobody can connect
        self._listener = await asyncio.start_unix_server(self._serve, sock=listener)
        self._path = path

    async def close(self) -> None:
        path, self._path = self._path, None
        if path:
            self._listener.close()
            path.unlink(missing_ok=True)
            for task in self._answering:
                task.cancel()
            for writer in self._clients:
                writer.transport.abort()
            until = time.monotonic() + LONGEST_PAUSE_S
            while (self._answering or self._clients) and time.monotonic() < until:
                await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = b"unix-%s-%d" % (self._name, next(self._numbers))
        self._clients.add(writer)
        try:
            credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            self._service.met(peer, struct.unpack("3i", credentials)[0])
            while True:
                head, payload = await read_frame(reader)
                try:
                    self._handle(peer, head, payload, writer)
                except Exception as error:
                    self._refuse(writer, head, error)
        except (ProtocolError, EOFError, OSError) as error:
            # After a malformed frame it is not known where the next one begins.
            self.refused += isinstance(error, ProtocolError) or bool(getattr(error, "partial", b""))
        finally:
            self._clients.discard(writer)
            writer.close()
            self._service.gone(peer)

    def _handle(self, peer: bytes, head: Head, payload: list[bytes], writer: asyncio.StreamWriter) -> None:
        codec = self._service.codec
        try:
            if head.version != codec.version:
                raise VersionMismatch(f"the client speaks version {head.version}, the server {codec.version}")
            request = Envelope(codec.decode(head.message), payload)
        except BlendHubError:
            self.refused += 1
            raise
        if len(self._answering) >= self._max_pending:
            raise Busy(f"{self.endpoint} has {self._max_pending} requests under way; try again later")
        answer = self._service.handle(peer, request)
        if isinstance(answer, Envelope):
            return self._reply(writer, head, answer)
        task = asyncio.ensure_future(self._reply_later(writer, head, answer))
        self._answering.add(task)
        return task.add_done_callback(self._answering.discard)

    async def _reply_later(self, writer: asyncio.StreamWriter, head: Head, answer: Awaitable[Envelope]) -> None:
        try:
            async with asyncio.timeout(head.seconds):
                self._reply(writer, head, await answer)
        except TimeoutError:
            self._refuse(writer, head, DeadlineExceeded(f"{self.endpoint}: cancelled at the request's deadline"))
        except Exception as error:
            self._refuse(writer, head, error)

    def _reply(self, writer: asyncio.StreamWriter, head: Head, answer: Envelope) -> None:
        codec = self._service.codec
        self._send(writer, frame(Head(codec.version, head.number, codec.encode(answer.message)), answer.payload))

    def _refuse(self, writer: asyncio.StreamWriter, head: Head, error: Exception) -> None:
        if not isinstance(error, BlendHubError):
            log.error("%s: the service failed", self.endpoint, exc_info=error)
            error = errors.ServiceFailed(f"the service raised {type(error).__name__}: {error}; its log says more")
        name = next(kind.__name__ for kind in type(error).__mro__ if KNOWN.get(kind.__name__) is kind)
        self._send(writer, frame(Head(self._service.codec.version, head.number, str(error).encode(), error=name)))

    def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if writer.transport.get_write_buffer_size() <= MAX_UNSENT:
            writer.write(data)


class UnixPending(Pending):
    def __init__(self, path: str, timeout: float) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < LONGEST_WAIT_S:
            raise InvalidInput(f"timeout = {timeout!r}, expected seconds from 0 on: every request has a deadline")
        self._deadline = time.monotonic() + timeout
        self._late = DeadlineExceeded(f"{path} did not answer within {timeout:g} s")
        self._outcome: Future[Envelope] = Future()

    def settle(self, outcome: Envelope | BlendHubError) -> None:
        """The first outcome counts."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, Envelope):
                self._outcome.set_result(outcome)
            else:
                self._outcome.set_exception(outcome)

    def done(self) -> bool:
        if time.monotonic() >= self._deadline:
            self.settle(self._late)
        return self._outcome.done()

    def result(self) -> Envelope:
        with contextlib.suppress(TimeoutError):
            return self._outcome.result(max(0.0, self._deadline - time.monotonic()))
        self.settle(self._late)
        return self._outcome.result()


class UnixConnection(Connection):
    """A thread with an event loop sends, receives and connects anew; callers only wait."""

    def __init__(self, path: str, codec: Codec, max_pending: int) -> None:
        self._path, self._codec, self._max_pending = path, codec, max_pending
        self._numbers = itertools.count(1)
        self._under_way: dict[int, UnixPending] = {}
        self._unsent: list[bytes] = []
        """While it connects."""
        self._writer: asyncio.StreamWriter | None = None
        self._trouble = ""
        """Why requests fail at once; empty while it is connected or tries to be."""
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._living = self._loop.create_task(self._live())
        threading.Thread(target=self._run, name="unix-transport", daemon=True).start()

    def submit(self, request: Envelope, timeout: float) -> Pending:
        pending = UnixPending(self._path, timeout)
        if os.getpid() != self._process:
            raise PeerGone(f"this connection to {self._path} belongs to the process before the fork; make another")
        if len(self._under_way) >= self._max_pending:
            raise Busy(f"this connection to {self._path} has {self._max_pending} requests under way")
        number, message = next(self._numbers), self._codec.encode(request.message)
        data = frame(Head(self._codec.version, number, message, seconds=timeout), request.payload)
        self._under_way[number] = pending
        try:
            self._loop.call_soon_threadsafe(self._send, number, data, timeout)
        except RuntimeError:  # the loop has ended
            self._fail_all()
        return pending

    def close(self) -> None:
        self._trouble = f"this connection to {self._path} was closed"
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._living.cancel)
        self._fail_all()

    # In the thread.

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._living)
        self._loop.run_until_complete(asyncio.sleep(0))  # the socket is closed in the next round
        self._loop.close()
        self._fail_all()

    async def _live(self) -> None:
        pause = 0.01
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                pause, self._trouble = 0.01, ""
                self._writer.writelines(self._unsent)
                while True:
                    self._settle(*await read_frame(reader))
            except (ProtocolError, EOFError, OSError) as error:
                self._trouble = f"no server answers at {self._path}: {error}"
            finally:
                self._unsent.clear()
                if self._writer:
                    self._writer.close()
                    self._writer = None
            self._fail_all()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _send(self, number: int, data: bytes, timeout: float) -> None:
        if self._trouble:
            return self._fail_all()
        if self._writer:
            self._writer.write(data)
        else:
            self._unsent.append(data)
        self._loop.call_later(timeout, self._under_way.pop, number, None)
        return None

    def _settle(self, head: Head, payload: list[bytes]) -> None:
        pending = self._under_way.pop(head.number, None)
        if pending is None:  # it was too late
            return
        try:
            if head.error:
                raise KNOWN.get(head.error, errors.ServiceFailed)(head.message.decode(errors="replace"))
            pending.settle(Envelope(self._codec.decode(head.message), payload))
        except BlendHubError as error:
            pending.settle(error)

    def _fail_all(self) -> None:
        while self._under_way:
            with contextlib.suppress(KeyError):
                self._under_way.popitem()[1].settle(PeerGone(self._trouble))


class UnixTransport(Transport):
    schemes = (SCHEME,)

    def __init__(self, options: UnixOptions) -> None:
        self._max_pending = options.max_pending

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = UnixServer(endpoint, service, self._max_pending)
        await server.listen(Path(_path(endpoint)))
        return server

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return UnixConnection(_path(endpoint), codec, self._max_pending)


def _path(endpoint: str) -> str:
    path = endpoint.removeprefix(SCHEME)
    if path == endpoint or not 0 < len(path.encode()) <= 107:
        raise InvalidInput(f"endpoint {endpoint!r} is not understood; expected {SCHEME}/PATH of at most 107 bytes")
    return path


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return True
    return False


@hookimpl
def blendhub_transports() -> list[PluginSpec[Transport]]:
    return [
        PluginSpec(
            name="unix",
            api=5,
            summary="requests between processes of one user, over a Unix socket",
            factory=UnixTransport,
            options=UnixOptions,
        )
    ]
