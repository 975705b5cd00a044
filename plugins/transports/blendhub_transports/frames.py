"""The bytes of the transport ``unix``: a fixed header, then the sizes of the parts, then the parts.

The first part is the message, the others are the buffers of its payload. The header is the same in every version, so
that two sides of different versions can still name their versions to each other.
"""

import inspect
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from blendhub.contracts.transport import Buffer, Codec, Envelope
from blendhub.core import errors
from blendhub.core.errors import BlendHubError, InvalidInput, ProtocolError, ServiceFailed, VersionMismatch

MAGIC: Final = b"BH"
PROTOCOL: Final = 3
"""The version of these frames; the messages inside have their own, the codec's."""

REQUEST: Final = 0
REPLY: Final = 1
ERROR: Final = 2

MOST_BYTES: Final = 2**26 + 2**20
"""The most that may follow a header: the largest prompt that a hub takes, 2**24 tokens, and what is said of it."""
LONGEST_SENTENCE: Final = 4000

_ERRORS: Final[Mapping[str, type[BlendHubError]]] = MappingProxyType(
    {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BlendHubError)}
)
_error_decoder: Final = msgspec.msgpack.Decoder(tuple[str, str])
_HEADER: Final = struct.Struct("<2sHHBxHQdQ")
HEADER_BYTES: Final = _HEADER.size


class Header(NamedTuple):
    magic: bytes
    protocol: int
    codec: int
    kind: int
    n_parts: int
    number: int
    """Given to a request by its connection, and repeated in the answer."""
    deadline: float
    """When the caller stops waiting, on the clock ``time.monotonic`` that a machine's processes share; 0 in answers."""
    size: int
    """How many bytes follow."""


def encode(codec: int, kind: int, number: int, deadline: float, parts: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of a frame, whose parts are not copied, except the first one."""
    views = list(map(_flat, parts))
    sizes = [view.nbytes for view in views]
    size = sum(sizes) + 8 * len(sizes)
    if size > MOST_BYTES:
        raise ProtocolError(f"a message of {size:,} bytes; at most {MOST_BYTES:,} are sent")
    header = _HEADER.pack(MAGIC, PROTOCOL, codec, kind, len(parts), number, deadline, size)
    return [header + struct.pack(f"<{len(sizes)}Q", *sizes) + views[0], *views[1:]]


def encode_error(error: BlendHubError) -> bytes:
    """A class name and a sentence, all that leaves the server; a plugin's class is sent as its nearest base class in
    :mod:`blendhub.core.errors`.
    """
    name = next(kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    return msgspec.msgpack.encode((name, str(error)[:LONGEST_SENTENCE]))


def read_header(frame: Buffer) -> Header:
    """The header of a frame; raises ProtocolError if these bytes never were one."""
    header = Header._make(_HEADER.unpack_from(frame))
    if header.magic != MAGIC:
        raise ProtocolError(f"a frame begins with {header.magic!r}, expected {MAGIC!r}: the sender is not BlendHub")
    return header


def check(header: Header, codec: int, *, reader: str, writer: str) -> None:
    """Raise an error unless ``writer``, which sent this header, has the versions of ``reader``, and sends no more than
    one may.
    """
    if (header.protocol, header.codec) != (PROTOCOL, codec):
        raise VersionMismatch(
            f"{writer} speaks version {header.protocol}.{header.codec} (protocol.messages), {reader} speaks "
            f"{PROTOCOL}.{codec}; install the same BlendHub on both sides"
        )
    if header.size > MOST_BYTES:
        raise ProtocolError(f"a message of {header.size:,} bytes; at most {MOST_BYTES:,} are taken")


def decode(header: Header, body: memoryview, codec: Codec) -> Envelope:
    """The message behind a header, and its payload; raises ProtocolError, or the error that the message is."""
    at = 8 * header.n_parts
    if not header.n_parts or at > len(body):
        raise ProtocolError(f"a frame of {len(body)} bytes cannot have {header.n_parts} parts")
    parts = []
    for size in struct.unpack_from(f"<{header.n_parts}Q", body):
        parts.append(body[at : at + size])
        at += size
    if at != len(body):
        raise ProtocolError(f"the parts of a frame have {at} bytes, and the frame has {len(body)}")
    if header.kind == ERROR:
        raise _decode_error(parts[0])
    return Envelope(codec.decode(parts[0]), parts[1:])


def _decode_error(body: memoryview) -> BlendHubError:
    """The error in these bytes; only classes of :mod:`blendhub.core.errors` are created from a name."""
    try:
        name, sentence = _error_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return ProtocolError(f"the server answered with an error that does not decode: {error}")
    return _ERRORS.get(name, ServiceFailed)(sentence)


def _flat(buffer: Buffer) -> memoryview:
    try:
        return memoryview(buffer).cast("B")
    except TypeError as error:
        raise InvalidInput(f"a payload holds buffers whose bytes are contiguous: {error}") from None
