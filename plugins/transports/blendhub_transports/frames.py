"""The bytes of the zmq transport: a fixed header with the message behind it, then the payload's frames.

The header, and the body of a fault, are the same in every version, so that two sides of different versions
can still tell each other which ones they speak.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import zmq

from blendhub.contracts.transport import Buffer
from blendhub.errors import InvalidInput, ProtocolError, VersionMismatch

MAGIC: Final = b"BH"
PROTOCOL: Final = 1
"""The version of these frames; the messages inside have their own, the codec's."""

REQUEST: Final = 0
REPLY: Final = 1
FAULT: Final = 2

MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
LAST: Final = int(zmq.NOBLOCK)
"""Plain numbers, because an enum's operators cost more than what they are for."""

COPY_BELOW: Final = 2**20
"""Smaller buffers are copied: ZeroMQ's account of a buffer that it must give back costs more than that."""

_HEADER: Final = struct.Struct("<2sHIQB3xId")
HEADER_BYTES: Final = _HEADER.size


class Header(NamedTuple):
    magic: bytes
    protocol: int
    codec: int
    number: int
    """Given to a request by its connection, and repeated in the answer."""
    kind: int
    timeout_ms: int
    """How long the caller will wait; 0 in answers."""
    sent: float
    """The sender's clock (seconds since 1970) when the request left; 0 in answers."""


def request_header(codec: int, number: int, timeout_ms: int, sent: float) -> bytes:
    return _HEADER.pack(MAGIC, PROTOCOL, codec, number, REQUEST, timeout_ms, sent)


def answer_header(codec: int, number: int, kind: int) -> bytes:
    return _HEADER.pack(MAGIC, PROTOCOL, codec, number, kind, 0, 0.0)


def read_header(frame: memoryview) -> Header:
    """The header of a frame; raises ProtocolError if these bytes never were one."""
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes is shorter than the header of {HEADER_BYTES}")
    header = Header(*_HEADER.unpack_from(frame))
    if header.magic != MAGIC:
        raise ProtocolError(f"a frame begins with {header.magic!r}, expected {MAGIC!r}: its sender is no BlendHub")
    return header


def check_versions(header: Header, codec: int, reader: str, writer: str) -> None:
    """Raise VersionMismatch unless ``writer``, who sent this header, speaks like ``reader``."""
    if header.protocol == PROTOCOL and header.codec == codec:
        return
    raise VersionMismatch(
        f"{writer} speaks version {header.protocol}.{header.codec} (protocol.messages), {reader} speaks "
        f"{PROTOCOL}.{codec}; install the same BlendHub on both sides"
    )


def check_frames(sizes: Sequence[int], max_frame_bytes: int, max_payload_frames: int) -> None:
    """Raise ProtocolError if a message of frames this large, header first, is more than the options allow."""
    if len(sizes) - 1 > max_payload_frames:
        raise ProtocolError(f"{len(sizes) - 1} payload frames, more than max_payload_frames = {max_payload_frames}")
    if max(sizes) > max_frame_bytes:
        raise ProtocolError(f"a frame of {max(sizes)} bytes, more than max_frame_bytes = {max_frame_bytes}")


def check_sendable(frame: bytes, payload: Sequence[Buffer], max_frame_bytes: int, max_payload_frames: int) -> None:
    """Raise InvalidInput for what cannot be sent as it lies in memory, ProtocolError for what is too much."""
    if not payload and len(frame) <= max_frame_bytes:
        return
    sizes = [len(frame)]
    for buffer in payload:
        try:
            view = memoryview(buffer)
        except TypeError:
            raise InvalidInput(f"a payload holds bytes-like buffers, got a {type(buffer).__name__}") from None
        if not view.contiguous:
            raise InvalidInput("a payload's buffers must be contiguous; copy this one first")
        sizes.append(view.nbytes)
    check_frames(sizes, max_frame_bytes, max_payload_frames)


def send(socket: "zmq.Socket[bytes]", frame: bytes, payload: Sequence[Buffer]) -> None:
    """Send a message with its payload; raises zmq.Again, with nothing sent, if the queue is full."""
    if not payload:
        socket.send(frame, LAST)
        return
    socket.send(frame, MORE)
    for buffer in payload[:-1]:
        socket.send(buffer, MORE, copy=memoryview(buffer).nbytes < COPY_BELOW)
    socket.send(payload[-1], LAST, copy=memoryview(payload[-1]).nbytes < COPY_BELOW)
