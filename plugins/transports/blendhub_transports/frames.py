"""The bytes of the zmq transport: a fixed header with the message behind it, then the payload's frames.

The header's first fields, up to the request's number, and the body of an error are the same in every version, so that
two sides of different versions can still name their versions to each other.
"""

import inspect
import struct
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
import zmq

from blendhub.contracts.transport import Buffer
from blendhub.core import errors
from blendhub.core.errors import BlendHubError, InvalidInput, ProtocolError, ServiceFailed, VersionMismatch

MAGIC: Final = b"BH"
PROTOCOL: Final = 2
"""The version of these frames; the messages inside have their own, the codec's."""

REQUEST: Final = 0
REPLY: Final = 1
ERROR: Final = 2

MOST_PAYLOAD_FRAMES: Final = 1024
"""The most buffers that travel beside one message."""

MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
LAST: Final = int(zmq.NOBLOCK)

COPY_BELOW: Final = 2**20
"""Smaller buffers are copied: that costs less than ZeroMQ's bookkeeping for a buffer that it has to return."""

LONGEST_SENTENCE: Final = 4000

_ERRORS: Final[Mapping[str, type[BlendHubError]]] = MappingProxyType(
    {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BlendHubError)}
)
_error_decoder: Final = msgspec.msgpack.Decoder(tuple[str, str])

_HEADER: Final = struct.Struct("<2sHHBxQId")
HEADER_BYTES: Final = _HEADER.size


class FrameHeader(NamedTuple):
    magic: bytes
    protocol: int
    codec: int
    kind: int
    number: int
    """Given to a request by its connection, and repeated in the answer."""
    timeout_ms: int
    """How long the caller will wait; 0 in answers."""
    sent: float
    """The sender's clock (seconds since 1970) when the request left; 0 in answers."""


def request(codec: int, number: int, message: bytes, timeout_ms: int, sent: float) -> bytes:
    return _HEADER.pack(MAGIC, PROTOCOL, codec, REQUEST, number, timeout_ms, sent) + message


def answer(codec: int, number: int, kind: int, message: bytes) -> bytes:
    return _HEADER.pack(MAGIC, PROTOCOL, codec, kind, number, 0, 0.0) + message


def encode_error(error: BlendHubError) -> bytes:
    """A class name and a sentence, all that leaves the server; a plugin's class is sent as its nearest base class in
    :mod:`blendhub.core.errors`.
    """
    name = next(kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    return msgspec.msgpack.encode((name, str(error)[:LONGEST_SENTENCE]))


def decode_error(body: memoryview) -> BlendHubError:
    """The error in these bytes; only classes of :mod:`blendhub.core.errors` are created from a name."""
    try:
        name, sentence = _error_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return ProtocolError(f"the server answered with an error that does not decode: {error}")
    return _ERRORS.get(name, ServiceFailed)(sentence)


def read_header(frame: memoryview) -> FrameHeader:
    """The header of a frame; raises ProtocolError if these bytes never were one."""
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(f"{len(frame)} bytes are less than a header, which has {HEADER_BYTES}")
    header = FrameHeader._make(_HEADER.unpack_from(frame))
    if header.magic != MAGIC:
        raise ProtocolError(f"a frame begins with {header.magic!r}, expected {MAGIC!r}: the sender is not BlendHub")
    return header


def message(frame: memoryview) -> memoryview:
    """The message behind the header."""
    return frame[HEADER_BYTES:]


def check_versions(header: FrameHeader, codec: int, reader: str, writer: str) -> None:
    """Raise VersionMismatch unless ``writer``, which sent this header, has the versions of ``reader``."""
    if header.protocol == PROTOCOL and header.codec == codec:
        return
    raise VersionMismatch(
        f"{writer} speaks version {header.protocol}.{header.codec} (protocol.messages), {reader} speaks "
        f"{PROTOCOL}.{codec}; install the same BlendHub on both sides"
    )


def check_frames(frame: Buffer, payload: Sequence[memoryview], max_frame_bytes: int) -> None:
    """Raise ProtocolError if a message of these frames is more than is allowed."""
    if not payload and len(frame) <= max_frame_bytes:
        return
    if len(payload) > MOST_PAYLOAD_FRAMES:
        raise ProtocolError(f"a payload of more than {MOST_PAYLOAD_FRAMES} frames")
    largest = max((view.nbytes for view in payload), default=0)
    if max(len(frame), largest) > max_frame_bytes:
        raise ProtocolError(
            f"a frame of {max(len(frame), largest)} bytes, more than max_frame_bytes = {max_frame_bytes}"
        )


def check_sendable(frame: bytes, payload: Sequence[Buffer], max_frame_bytes: int) -> None:
    """Raise InvalidInput for a payload that is not contiguous buffers, ProtocolError for one above the limits."""
    views = []
    for buffer in payload:
        try:
            view = memoryview(buffer)
        except TypeError:
            raise InvalidInput(f"a payload holds bytes-like buffers, got a {type(buffer).__name__}") from None
        if not view.contiguous:
            raise InvalidInput("a payload's buffers must be contiguous; copy this one first")
        views.append(view)
    check_frames(frame, views, max_frame_bytes)


def send(socket: "zmq.Socket[bytes]", frame: bytes, payload: Sequence[Buffer]) -> None:
    """Send a message with its payload; raises zmq.Again, with nothing sent, if the queue is full."""
    last = len(payload)
    for at, buffer in enumerate((frame, *payload)):
        flags = LAST if at == last else MORE
        socket.send(buffer, flags, copy=memoryview(buffer).nbytes < COPY_BELOW)


def receive(socket: "zmq.Socket[bytes]", most: int = sys.maxsize) -> tuple[zmq.Frame, list[memoryview]]:
    """The next frame, and the payload behind it. At most one payload frame more than ``most`` is kept.

    Frames are not copied; such a frame also knows whether another one follows.
    """
    first = part = socket.recv(LAST, copy=False)
    payload: list[memoryview] = []
    while part.more:
        part = socket.recv(LAST, copy=False)
        if len(payload) <= most:
            payload.append(part.buffer)
    return first, payload
