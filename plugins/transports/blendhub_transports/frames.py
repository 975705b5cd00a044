"""The frames of the transport ``zmq``: a fixed header with the message behind it, then the buffers of the payload.

The header is the same in every version, so that two sides of different versions can still name their versions to each
other.
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

MAX_BYTES: Final = 2**26 + 2**20
"""The most of a message with its payload: the largest prompt that a hub takes, 2**24 tokens, and what is said of it."""
LONGEST_SENTENCE: Final = 4000

_ERRORS: Final[Mapping[str, type[BlendHubError]]] = MappingProxyType(
    {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BlendHubError)}
)
_error_decoder: Final = msgspec.msgpack.Decoder(tuple[str, str])
_HEADER: Final = struct.Struct("<2sHHBxQd")
HEADER_BYTES: Final = _HEADER.size


class Header(NamedTuple):
    magic: bytes
    protocol: int
    codec: int
    kind: int
    number: int
    """Given to a request by its connection, and repeated in the answer."""
    deadline: float
    """When the caller stops waiting, on the clock ``time.monotonic`` that a machine's processes share; 0 in answers."""


def encode(
    codec: int, kind: int, number: int, deadline: float, message: bytes, payload: Sequence[Buffer] = ()
) -> list[Buffer]:
    """The frames of a message; the buffers of the payload are not copied."""
    views = list(map(_flat, payload))
    check_size(len(message) + sum(view.nbytes for view in views), "sent")
    return [_HEADER.pack(MAGIC, PROTOCOL, codec, kind, number, deadline) + message, *views]


def encode_error(error: BlendHubError) -> bytes:
    """A class name and a sentence, all that leaves the server; a plugin's class is sent as its nearest base class in
    :mod:`blendhub.core.errors`.
    """
    name = next(kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
    return msgspec.msgpack.encode((name, str(error)[:LONGEST_SENTENCE]))


def read_header(frame: memoryview) -> Header:
    """The header of a message; raises ProtocolError if these bytes never were one."""
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(f"{len(frame)} bytes are less than a header, which has {HEADER_BYTES}")
    header = Header._make(_HEADER.unpack_from(frame))
    if header.magic != MAGIC:
        raise ProtocolError(f"a frame begins with {header.magic!r}, expected {MAGIC!r}: the sender is not BlendHub")
    return header


def decode(header: Header, parts: Sequence[memoryview], codec: Codec, *, reader: str, writer: str) -> Envelope:
    """The message in these frames, the first of which has this header; raises the error that the message is.

    Raises VersionMismatch unless ``writer``, which sent it, has the versions of ``reader``, and ProtocolError if it is
    larger than one may be, or does not decode.
    """
    if (header.protocol, header.codec) != (PROTOCOL, codec.version):
        raise VersionMismatch(
            f"{writer} speaks version {header.protocol}.{header.codec} (protocol.messages), {reader} speaks "
            f"{PROTOCOL}.{codec.version}; install the same BlendHub on both sides"
        )
    check_size(sum(map(len, parts)) - HEADER_BYTES, "taken")
    message = parts[0][HEADER_BYTES:]
    if header.kind == ERROR:  # only classes of blendhub.core.errors are made from a name
        try:
            name, sentence = _error_decoder.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the server answered with an error that does not decode: {error}") from None
        raise _ERRORS.get(name, ServiceFailed)(sentence)
    return Envelope(codec.decode(message), parts[1:])


def check_size(n_bytes: int, what: str) -> None:
    if n_bytes > MAX_BYTES:
        raise ProtocolError(f"a message of {n_bytes:,} bytes; at most {MAX_BYTES:,} are {what}")


def _flat(buffer: Buffer) -> memoryview:
    try:
        return memoryview(buffer).cast("B")
    except TypeError as error:
        raise InvalidInput(f"a payload holds buffers whose bytes are contiguous: {error}") from None
