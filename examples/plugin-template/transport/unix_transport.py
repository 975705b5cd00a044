"""A transport in one file: over a Unix socket, which asyncio serves, and two threads of each client write and read.

What does not depend on how bytes travel comes from ``blendhub_transports``: frames, deadlines, bounds, errors.
"""

import asyncio
import secrets
import socket
import struct
import threading
from contextlib import suppress
from queue import SimpleQueue

from blendhub_transports import frames
from blendhub_transports.answering import FrameServer
from blendhub_transports.lines import Line, LineConnection
from blendhub_transports.options import TransportOptions
from blendhub_transports.socket_file import SocketFile, why_unreachable

from blendhub import PluginSpec, hookimpl
from blendhub.contracts import Codec, Connection, Server, Service, Transport
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import Busy, InvalidInput, PeerGone, ProtocolError

SIZE = struct.Struct("<Q")
"""Stands before each message, and before each of its frames."""
MAX_BYTES = frames.MAX_BYTES + 2**20
"""The most of a message with its sizes and its header."""
MAX_FRAMES = 2**10


def joined(parts: list[Buffer]) -> bytes:
    sized = b"".join(each for part in parts for each in (SIZE.pack(memoryview(part).nbytes), part))
    return SIZE.pack(len(sized)) + sized


def size_of(head: bytes) -> int:
    (size,) = SIZE.unpack(head)
    if size > MAX_BYTES:
        raise ProtocolError(f"a message of {size:,} bytes; at most {MAX_BYTES:,} are taken")
    return int(size)


def split(message: bytes) -> list[memoryview]:
    parts, at, view = list[memoryview](), 0, memoryview(message)
    while at + SIZE.size <= len(view) and len(parts) < MAX_FRAMES:
        begin, (size,) = at + SIZE.size, SIZE.unpack_from(view, at)
        parts.append(view[begin : begin + size])
        at = begin + size
    if at != len(view):
        raise ProtocolError(f"the frames of a message end at byte {at} of {len(view)}")
    return parts


class UnixServer(FrameServer):
    def __init__(self, endpoint: str, service: Service, max_pending: int) -> None:
        super().__init__(endpoint, service, max_pending)
        self._file = SocketFile(path_of(endpoint))
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._listener = await asyncio.start_unix_server(self._accept, sock=self._file.socket)

    async def close(self) -> None:
        if not self._listener.is_serving():
            return
        self._file.remove()
        self._listener.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await self.dispatcher.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take requests until the connection ends, or until nothing says where the next message begins."""

        def send(parts: list[Buffer]) -> None:
            if writer.transport.get_write_buffer_size() <= MAX_BYTES:  # a client that reads no replies loses them
                writer.write(joined(parts))

        peer = secrets.token_bytes(16)
        try:
            while first := await reader.read(1):
                size = size_of(first + await reader.readexactly(SIZE.size - 1))
                self.take(peer, split(await reader.readexactly(size)), send)
                await asyncio.sleep(0)  # a flood of requests leaves the loop to others
        except (asyncio.IncompleteReadError, ProtocolError) as error:
            self.refuse(error)
        except ConnectionError:
            pass
        finally:
            writer.close()
        self.dispatcher.peer_gone(peer)


class UnixLine(Line):
    """A connected socket with a thread that writes and one that reads; both end with the connection."""

    def __init__(self, path: str, endpoint: str, codec: Codec) -> None:
        super().__init__(endpoint, codec)
        self._path = path
        self._is_closed = False
        self._outbox: SimpleQueue[list[Buffer]] = SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.setblocking(False)  # a server that stands still accepts nothing
            self._socket.connect(path)
            self._socket.setblocking(True)
        except OSError:
            self._socket.close()
            raise why_unreachable(path, endpoint) or Busy(f"{endpoint} did not accept a connection") from None
        for work in (self._write, self._read):
            threading.Thread(target=work, name="unix-transport", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, parts: list[Buffer]) -> None:
        self._outbox.put(parts)

    def _write(self) -> None:
        with suppress(OSError), self._socket:
            while parts := self._outbox.get():
                self._socket.sendall(joined(parts))

    def _read(self) -> None:
        with suppress(OSError, ProtocolError), self._socket.makefile("rb") as stream:
            while len(head := stream.read(SIZE.size)) == SIZE.size:
                message = split(stream.read(size_of(head)))
                with self._lock:
                    self._settle(message)
        left = PeerGone(
            f"the server at {self._endpoint} died or left; the request may or may not have been carried out"
        )
        why = None if self._is_closed else why_unreachable(self._path, self._endpoint) or left
        with self._lock:
            self._end(why)
        self._outbox.put([])


class UnixConnection(LineConnection):
    def _connect(self) -> Line:
        return UnixLine(path_of(self._endpoint), self._endpoint, self._codec)


class UnixTransport(Transport):
    schemes = ("unix://",)

    def __init__(self, options: TransportOptions) -> None:
        self._max_pending = options.max_pending

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = UnixServer(endpoint, service, self._max_pending)
        await server.start()
        return server

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        path_of(endpoint)
        return UnixConnection(endpoint, codec, self._max_pending)


def path_of(endpoint: str) -> str:
    if not endpoint.startswith("unix:///"):
        raise InvalidInput(f"endpoint {endpoint!r} is not understood; expected unix:///PATH/OF/SOCKET")
    return endpoint.removeprefix("unix://")


@hookimpl
def blendhub_transports() -> list[PluginSpec[Transport]]:
    return [
        PluginSpec(
            name="unix",
            api=1,
            summary="requests between processes of one user on one machine, over a Unix socket",
            factory=UnixTransport,
            options=TransportOptions,
        )
    ]
