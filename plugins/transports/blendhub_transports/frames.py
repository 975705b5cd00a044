"""The bytes of the zmq transport: a fixed header with the message behind it, then the payload's frames.

Several answers may stand behind one another in one frame; a payload then belongs to none of them.

The header, and the body of a fault, are the same in every version, so that two sides of different versions
can still tell each other which ones they speak.
"""

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import zmq

from blendhub.contracts.transport import Buffer
from blendhub.errors import InvalidInput, ProtocolError, VersionMismatch

MAGIC: Final = b"BH"
PROTOCOL: Final = 1
"""The version of these frames; the messages inside have their own, the codec's."""

REQUEST: Final = 0
REPLY: Final = 1
ERROR: Final = 2

MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
LAST: Final = int(zmq.NOBLOCK)
"""Plain numbers, because an enum's operators cost more than what they are for."""

COPY_BELOW: Final = 2**20
"""Smaller buffers are copied: ZeroMQ's account of a buffer that it must give back costs more than that."""

Send: TypeAlias = Callable[..., Any]
"""A socket's bare ``send(buffer, flags, copy)``."""

_HEADER: Final = struct.Struct("<2sHHBBQQId")
HEADER_BYTES: Final = _HEADER.size


class Header(NamedTuple):
    magic: bytes
    protocol: int
    codec: int
    kind: int
    patient: int
    """Not 0 in a request whose caller has others under way: its answer may wait a moment, to travel with theirs."""
    number: int
    """Given to a request by its connection, and repeated in the answer."""
    size: int
    """Bytes of the message."""
    timeout_ms: int
    """How long the caller will wait; 0 in answers."""
    sent: float
    """The sender's clock (seconds since 1970) when the request left; 0 in answers."""


def request(codec: int, number: int, message: bytes, timeout_ms: int, sent: float, *, patient: bool) -> bytes:
    return _HEADER.pack(MAGIC, PROTOCOL, codec, REQUEST, patient, number, len(message), timeout_ms, sent) + message


def answer(codec: int, number: int, kind: int, message: bytes) -> bytes:
    return _HEADER.pack(MAGIC, PROTOCOL, codec, kind, False, number, len(message), 0, 0.0) + message


def read_header(frame: memoryview, at: int = 0) -> Header:
    """The header that begins there; raises ProtocolError if these bytes never were one."""
    if len(frame) - at < HEADER_BYTES:
        raise ProtocolError(f"{len(frame) - at} bytes are less than a header, which has {HEADER_BYTES}")
    header = Header._make(_HEADER.unpack_from(frame, at))
    if header.magic != MAGIC:
        raise ProtocolError(f"a frame begins with {header.magic!r}, expected {MAGIC!r}: its sender is no BlendHub")
    return header


def only_message(frame: memoryview, header: Header) -> memoryview:
    """What stands behind the header; raises ProtocolError if it is more or less than one message."""
    if len(frame) != HEADER_BYTES + header.size:
        raise ProtocolError(f"a message of {header.size} bytes came in {len(frame) - HEADER_BYTES}")
    return frame[HEADER_BYTES:]


def each_message(frame: memoryview) -> Iterator[tuple[Header, memoryview]]:
    """The messages that came together in a frame; raises ProtocolError where the rest of it is no message."""
    end = 0
    while end < len(frame) or not end:
        header = read_header(frame, end)
        start, end = end + HEADER_BYTES, end + HEADER_BYTES + header.size
        if end > len(frame):
            raise ProtocolError(f"a message of {header.size} bytes came in {len(frame) - start}")
        yield header, frame[start:end]


def check_versions(header: Header, codec: int, reader: str, writer: str) -> None:
    """Raise VersionMismatch unless ``writer``, who sent this header, speaks like ``reader``."""
    if header.protocol == PROTOCOL and header.codec == codec:
        return
    raise VersionMismatch(
        f"{writer} speaks version {header.protocol}.{header.codec} (protocol.messages), {reader} speaks "
        f"{PROTOCOL}.{codec}; install the same BlendHub on both sides"
    )


def check_frames(frame: Buffer, payload: Sequence[memoryview], max_frame_bytes: int, max_payload_frames: int) -> None:
    """Raise ProtocolError if a message of these frames is more than the options allow."""
    if not payload and len(frame) <= max_frame_bytes:
        return
    if len(payload) > max_payload_frames:
        raise ProtocolError(f"a payload of more frames than max_payload_frames = {max_payload_frames}")
    largest = max((view.nbytes for view in payload), default=0)
    if max(len(frame), largest) > max_frame_bytes:
        raise ProtocolError(
            f"a frame of {max(len(frame), largest)} bytes, more than max_frame_bytes = {max_frame_bytes}"
        )


def check_sendable(frame: bytes, payload: Sequence[Buffer], max_frame_bytes: int, max_payload_frames: int) -> None:
    """Raise InvalidInput for what cannot be sent as it lies in memory, ProtocolError for what is too much."""
    views = []
    for buffer in payload:
        try:
            view = memoryview(buffer)
        except TypeError:
            raise InvalidInput(f"a payload holds bytes-like buffers, got a {type(buffer).__name__}") from None
        if not view.contiguous:
            raise InvalidInput("a payload's buffers must be contiguous; copy this one first")
        views.append(view)
    check_frames(frame, views, max_frame_bytes, max_payload_frames)


def sending(socket: "zmq.Socket[bytes]") -> Send:
    """The socket's ``send`` without what pyzmq wraps around it, which takes longer than sending."""
    bare: Send = super(zmq.Socket, socket).send
    return bare


def send(bare: Send, frame: Buffer, payload: Sequence[Buffer]) -> None:
    """Send a message with its payload; raises zmq.Again, with nothing sent, if the queue is full."""
    if not payload:
        bare(frame, LAST)
        return
    bare(frame, MORE)
    for buffer in payload[:-1]:
        bare(buffer, MORE, memoryview(buffer).nbytes < COPY_BELOW)
    bare(payload[-1], LAST, memoryview(payload[-1]).nbytes < COPY_BELOW)


def receive(socket: "zmq.Socket[bytes]", flags: int, most: int = sys.maxsize) -> tuple[zmq.Frame, list[memoryview]]:
    """The next frame, and the payload behind it, of which one frame more than ``most`` is kept at most.

    Uncopied, since such a frame knows whether another one follows: to ask the socket takes longer than to copy.
    """
    first = part = socket.recv(flags, False)
    payload: list[memoryview] = []
    while part.more:
        part = socket.recv(LAST, False)
        if len(payload) <= most:
            payload.append(part.buffer)
    return first, payload
