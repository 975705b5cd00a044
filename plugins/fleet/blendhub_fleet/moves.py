"""Chunks on their way between the arena and the place of their bytes, with checksums."""

import contextlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import numpy as np
import xxhash

from blendhub.contracts import ArenaFile
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput, StoreFailed
from blendhub_fleet.bytes import ByteStore, Extent
from blendhub_fleet.records import Record

_checksum = xxhash.xxh3_128_digest


class Fetched(Enum):
    """The result of fetching the bytes of a chunk."""

    WHOLE = "whole"
    GONE = "gone"
    OTHER = "not what was saved"
    UNKNOWN = "catalogued with a record that no hub has written"


class Moves:
    """An attached arena, and the place of bytes."""

    def __init__(
        self, group: str, file: ArenaFile, memory: memoryview, open_bytes: Callable[[ArenaFile], ByteStore]
    ) -> None:
        self._group = group
        self._arena = np.frombuffer(memory, np.uint8)
        self._bytes = open_bytes(file)

    def stats(self) -> dict[str, float]:
        return self._bytes.stats()

    def close(self) -> None:
        self._bytes.close()
        self._arena = np.empty(0, np.uint8)

    def put(self, chunks: Sequence[Sequence[Buffer]]) -> tuple[list[Record], list[bool]]:
        """Keep the bytes of chunks; returns their records, and for each whether there was room."""
        records = [
            Record(secrets.token_hex(16), tuple(map(len, shards)), tuple(map(_checksum, shards))) for shards in chunks
        ]
        stored = self._bytes.put(self._keys(records), self._extents(chunks))
        return records, [all(answers) for answers in _by_record(stored, records)]

    def get(self, records: Sequence[Record], chunks: Sequence[Sequence[memoryview]]) -> list[Fetched]:
        """Fill the shards of chunks."""
        if not records:
            return []
        answers = _by_record(self._bytes.get(self._keys(records), self._extents(chunks)), records)
        return list(map(_fetched, records, chunks, answers))

    def remove(self, records: Iterable[Record]) -> None:
        """Remove bytes, as far as that succeeds: the place evicts by itself what no hub knows."""
        keys = self._keys(records)
        if keys:
            with contextlib.suppress(StoreFailed):
                self._bytes.remove(keys)

    def _keys(self, records: Iterable[Record]) -> list[str]:
        return [key for record in records for key in record.keys(self._group)]

    def _extents(self, chunks: Iterable[Sequence[Buffer]]) -> list[Extent]:
        return [self._extent(shard) for shards in chunks for shard in shards if len(shard)]

    def _extent(self, shard: Buffer) -> Extent:
        first = np.frombuffer(shard, np.uint8).ctypes.data - self._arena.ctypes.data
        if not 0 <= first <= first + len(shard) <= len(self._arena):
            raise InvalidInput("a shared store moves buffers of the attached arena, and got another one")
        return first, len(shard)


def _by_record(answers: Sequence[bool], records: Sequence[Record]) -> list[Sequence[bool]]:
    """Answers for each shard that has bytes, grouped."""
    left = iter(answers)
    return [[next(left) for size in record.sizes if size] for record in records]


def _fetched(record: Record, shards: Sequence[memoryview], answers: Sequence[bool]) -> Fetched:
    if not all(answers):
        return Fetched.GONE
    same = all(_checksum(shard) == wanted for shard, wanted in zip(shards, record.sums, strict=True))
    return Fetched.WHOLE if same else Fetched.OTHER
