"""The encoding of the catalogue's entries."""

import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from blendhub.contracts import RunKey
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span

T = TypeVar("T")
_SPAN = struct.Struct("<II")


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The place of the bytes of a chunk, and their description, shard by shard."""

    name: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    """Random, and new each time that a chunk is saved."""
    sizes: tuple[Annotated[int, Meta(ge=0)], ...]
    sums: tuple[Annotated[bytes, Meta(min_length=16, max_length=16)], ...]

    def keys(self, group: str) -> list[str]:
        """The keys of the shards that have bytes."""
        return [f"{group}/{self.name}/{rank}" for rank, size in enumerate(self.sizes) if size]


def encode_record(record: Record) -> bytes:
    return b"%d:" % sum(record.sizes) + msgspec.msgpack.encode(record)


def decode_record(text: bytes) -> Record:
    """The record; raises ValueError, of which MsgspecError is one, for an entry that no hub has written."""
    nbytes, _, packed = text.partition(b":")
    record = msgspec.msgpack.decode(packed, type=Record)
    if len(record.sizes) != len(record.sums) or sum(record.sizes) != int(nbytes):
        raise ValueError(f"{record} has not one checksum for each of its sizes, or other sizes than {nbytes!r} bytes")
    return record


def encode_name(key: RunKey) -> bytes:
    try:
        return msgspec.msgpack.encode(key)
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{key!r} is not text that can be written as UTF-8: {error}; use other names") from None


def decode(text: bytes, kind: type[T]) -> T | None:
    """A run's key, or what is deleted; None for a text that no hub has written."""
    try:
        return msgspec.msgpack.decode(text, type=kind)
    except msgspec.MsgspecError:
        return None


def encode_spans(spans: Iterable[Span]) -> bytes:
    try:
        return b"".join(_SPAN.pack(span.start, span.end) for span in spans)
    except struct.error:
        raise InvalidInput("positions of a catalogue are below 2**32; a run this long is not shared") from None


def decode_spans(text: bytes) -> Iterator[Span]:
    """The spans; entries that are no span are left out."""
    for start, end in _SPAN.iter_unpack(text[: len(text) // _SPAN.size * _SPAN.size]):
        if start < end:
            yield Span(start, end)
