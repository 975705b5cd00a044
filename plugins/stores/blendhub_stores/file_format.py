"""The format of the store's files: sections of bytes after a header with their owner, sizes and checksums.

A file is a preamble (magic, format version, length and checksum of the header), the header, and the sections one after
another. The header is written last, so that a file whose writing was interrupted has none.
"""

import contextlib
import errno
import os
import struct
import time
from collections.abc import Sequence

import msgspec
import xxhash

from blendhub.contracts import RunKey
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.system.safe_open import open_own

FORMAT = 1
PREAMBLE = struct.Struct("<7sBI16s")
MAGIC = b"BlendKV"
MAX_HEADER = 2**20
PIECE = 2**21
"""Bytes hashed and written at a time: few enough to stay in the processor's cache between the two."""
FIRST_READ = 4096
SUM_BYTES = 16

_checksum = xxhash.xxh3_128_digest


class Damaged(Exception):
    """A file does not hold a valid entry; the message says why."""


class FileHeader(msgspec.Struct, frozen=True, array_like=True):
    """A file's header: which entry it holds, and the sizes and checksums of its sections."""

    key: RunKey
    span: Span | None
    """The chunk's positions; None for the file of a run, whose sections are its tokens and description."""
    sizes: tuple[int, ...]
    sums: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(FileHeader)


def new_header(key: RunKey, span: Span | None, sections: Sequence[Buffer]) -> FileHeader:
    """The header of a file to be written, in its final length, with zeros as checksums."""
    header = FileHeader(key, span, tuple(len(section) for section in sections), (bytes(SUM_BYTES),) * len(sections))
    try:
        encoded = msgspec.msgpack.encode(header)
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{key!r} is not text that can be written as UTF-8: {error}; use other names") from None
    if len(encoded) > MAX_HEADER:
        raise InvalidInput(
            f"a run's names and {len(sections)} shards make a header of {len(encoded)} bytes, "
            f"{MAX_HEADER} are allowed; use shorter names"
        )
    return header


def file_size(header: FileHeader) -> int:
    return PREAMBLE.size + len(msgspec.msgpack.encode(header)) + sum(header.sizes)


def write(path: str, header: FileHeader, sections: Sequence[Buffer], *, fsync: bool) -> None:
    """Write a new file. If it raises OSError, the incomplete file stays."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        at = file_size(header) - sum(header.sizes)
        sums = []
        for section in sections:
            sums.append(_write_section(fd, section, at))
            at += len(section)
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(header, sums=tuple(sums)))
        preamble = PREAMBLE.pack(MAGIC, FORMAT, len(encoded), _checksum(encoded))
        _write_all(fd, memoryview(preamble + encoded), 0)
        _mark_used(fd)
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)


class StoreFile:
    """An open file with a valid header that fits its size. Sections are verified when they are read."""

    def __init__(self, path: str) -> None:
        self._fd = open_own(path, os.O_RDONLY)
        try:
            self.nbytes = os.fstat(self._fd).st_size
            self.header = self._read_header()
            self._sections_at = file_size(self.header) - sum(self.header.sizes)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> "StoreFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def fill(self, into: Sequence[memoryview]) -> bool:
        """Fill a buffer for each section with its verified bytes, and mark the file as used."""
        if self.header.sizes != tuple(len(view) for view in into):
            raise InvalidInput(
                f"{self.header.span} of {self.header.key} was saved in shards of {list(self.header.sizes)} bytes, "
                f"the buffers to load it into have {[len(view) for view in into]}; pass buffers of those sizes"
            )
        self._read(into)
        with contextlib.suppress(OSError):  # the bytes are valid even if their last use cannot be recorded
            _mark_used(self._fd)
        return True

    def sections(self) -> list[bytes]:
        buffers = [bytearray(size) for size in self.header.sizes]
        self._read([memoryview(buffer) for buffer in buffers])
        return [bytes(buffer) for buffer in buffers]

    def _read(self, into: Sequence[memoryview]) -> None:
        at = self._sections_at
        for section, view in enumerate(into):
            if _read_section(self._fd, view, at) != self.header.sums[section]:
                raise Damaged(f"the bytes of section {section} do not match their checksum")
            at += len(view)

    def _read_header(self) -> FileHeader:
        head = _read_at(self._fd, FIRST_READ, 0)
        if len(head) < PREAMBLE.size:
            raise Damaged(f"it ends after {len(head)} bytes, within the preamble")
        magic, version, length, checksum = PREAMBLE.unpack_from(head)
        if magic != MAGIC:
            raise Damaged("it does not begin with the magic bytes of this store")
        if version != FORMAT:
            raise Damaged(f"it has format {version}, this release reads format {FORMAT}")
        if length > MAX_HEADER:
            raise Damaged(f"its header claims {length} bytes")
        encoded = head[PREAMBLE.size : PREAMBLE.size + length]
        if len(encoded) < length:
            encoded = _read_at(self._fd, length, PREAMBLE.size)
        if _checksum(encoded) != checksum:
            raise Damaged("its header does not match its checksum")
        try:
            header = _decoder.decode(encoded)
        except msgspec.MsgspecError as error:
            raise Damaged(f"its header does not decode: {error}") from None
        n_sections = len(header.sizes)
        if not n_sections or len(header.sums) != n_sections or (header.span is None and n_sections != 2):
            raise Damaged(f"its header has {len(header.sizes)} sizes and {len(header.sums)} checksums")
        described = file_size(header)
        if described != self.nbytes:
            raise Damaged(f"its header describes {described} bytes, but the file has {self.nbytes}")
        return header


def _mark_used(fd: int) -> None:
    # The file system's own timestamps are too coarse to order files written one after another.
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _write_section(fd: int, section: Buffer, at: int) -> bytes:
    checksum = xxhash.xxh3_128()
    for start in range(0, len(section), PIECE):
        piece = section[start : start + PIECE]
        checksum.update(piece)
        _write_all(fd, piece, at + start)
    return checksum.digest()


def _write_all(fd: int, piece: Buffer, at: int) -> None:
    while piece:
        written = os.pwrite(fd, piece, at)
        piece, at = piece[written:], at + written


def _read_section(fd: int, view: memoryview, at: int) -> bytes:
    checksum = xxhash.xxh3_128()
    for start in range(0, len(view), PIECE):
        piece = view[start : start + PIECE]
        filled = 0
        while filled < len(piece):
            got = _read_into(fd, piece[filled:], at + start + filled)
            if not got:
                raise Damaged("it was truncated while it was read")
            filled += got
        checksum.update(piece)
    return checksum.digest()


def _read_at(fd: int, length: int, at: int) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: _read_into(fd, memoryview(buffer), at)])


def _read_into(fd: int, view: memoryview, at: int) -> int:
    try:
        return os.preadv(fd, [view], at)
    except OSError as error:
        if error.errno == errno.EIO:  # the medium has lost these bytes; reading again would not help
            raise Damaged("the disk cannot read it") from error
        raise
