"""The format of the store's files: sections of bytes behind a header that names them and vouches for them.

A file is a preamble (magic, format version, length and checksum of the header), the header, and the sections
one after another. The header is written last, so that a file torn while it was written has none.
"""

import contextlib
import errno
import os
import struct
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
import xxhash

from blendhub.contracts import RunKey
from blendhub.errors import InvalidInput
from blendhub.plan import Span

FORMAT = 1
PREAMBLE = struct.Struct("<7sBI16s")
MAGIC = b"BlendKV"
MAX_HEADER = 2**20
PIECE = 2**21
"""Bytes hashed and moved in one go: few enough to be still in the processor's cache the second time."""
FIRST_READ = 4096

_checksum = xxhash.xxh3_128_digest


class Damaged(Exception):
    """A file does not hold what it should; the sentence says in what way."""


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """A file's header: whose bytes these are, and how to tell whether they are still the same."""

    key: RunKey
    span: Span | None
    """The chunk's positions; None for the file of a run, whose sections are its tokens and its description."""
    sizes: tuple[int, ...]
    sums: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(Seal)


def flat(buffer: Any) -> memoryview:
    """The bytes of any contiguous buffer."""
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidInput(f"a store keeps bytes, bytearrays and memoryviews, got {type(buffer).__name__}") from None
    if not view.nbytes:
        return memoryview(bytearray())  # views of no bytes and several dimensions cannot be cast
    if not view.c_contiguous:
        raise InvalidInput(f"a store needs contiguous buffers, got one with strides {view.strides}; copy it first")
    return view.cast("B")


def unsealed(key: RunKey, span: Span | None, sections: Sequence[memoryview]) -> Seal:
    """The header of a file that is to be written, as long as it will be, without its checksums."""
    seal = Seal(key, span, tuple(len(section) for section in sections), (bytes(16),) * len(sections))
    try:
        header = msgspec.msgpack.encode(seal)
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{key!r} is not text that can be written as UTF-8: {error}; use other names") from None
    if len(header) > MAX_HEADER:
        raise InvalidInput(
            f"a run's names and {len(sections)} shards make a header of {len(header)} bytes, "
            f"{MAX_HEADER} are allowed; use shorter names"
        )
    return seal


def file_size(seal: Seal) -> int:
    return PREAMBLE.size + len(msgspec.msgpack.encode(seal)) + sum(seal.sizes)


def write(path: str, seal: Seal, sections: Sequence[memoryview], *, fsync: bool) -> None:
    """Make a new file; an OSError leaves the part that was written."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        at = file_size(seal) - sum(seal.sizes)
        sums = []
        for section in sections:
            sums.append(_write_section(fd, section, at))
            at += len(section)
        header = msgspec.msgpack.encode(msgspec.structs.replace(seal, sums=tuple(sums)))
        preamble = PREAMBLE.pack(MAGIC, FORMAT, len(header), _checksum(header))
        _write_all(fd, memoryview(preamble + header), 0)
        _mark_used(fd)
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)


class SealedFile:
    """An open file whose header is whole and fits its size. Its sections are verified as they are read."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.nbytes = os.fstat(self._fd).st_size
            self.seal = self._read_seal()
            self._sections_at = file_size(self.seal) - sum(self.seal.sizes)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> "SealedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def fill(self, into: Sequence[memoryview]) -> bool:
        """Fill a buffer for each section with its verified bytes, and mark the file as used."""
        if self.seal.sizes != tuple(len(view) for view in into):
            raise InvalidInput(
                f"{self.seal.span} of {self.seal.key} was saved in shards of {list(self.seal.sizes)} bytes, "
                f"the buffers to load it into have {[len(view) for view in into]}; pass buffers of those sizes"
            )
        self._read(into)
        with contextlib.suppress(OSError):  # the bytes are good even where their last use cannot be noted
            _mark_used(self._fd)
        return True

    def sections(self) -> list[bytes]:
        buffers = [bytearray(size) for size in self.seal.sizes]
        self._read([memoryview(buffer) for buffer in buffers])
        return [bytes(buffer) for buffer in buffers]

    def _read(self, into: Sequence[memoryview]) -> None:
        at = self._sections_at
        for section, view in enumerate(into):
            if _read_section(self._fd, view, at) != self.seal.sums[section]:
                raise Damaged(f"the bytes of section {section} do not match their checksum")
            at += len(view)

    def _read_seal(self) -> Seal:
        head = _read_at(self._fd, FIRST_READ, 0)
        if len(head) < PREAMBLE.size:
            raise Damaged(f"it ends after {len(head)} bytes, within the preamble")
        magic, version, length, checksum = PREAMBLE.unpack_from(head)
        if magic != MAGIC:
            raise Damaged("it does not begin as a file of this store")
        if version != FORMAT:
            raise Damaged(f"it has format {version}, this release reads format {FORMAT}")
        if length > MAX_HEADER:
            raise Damaged(f"its header claims {length} bytes")
        header = head[PREAMBLE.size : PREAMBLE.size + length]
        if len(header) < length:
            header = _read_at(self._fd, length, PREAMBLE.size)
        if _checksum(header) != checksum:
            raise Damaged("its header does not match its checksum")
        try:
            seal = _decoder.decode(header)
        except msgspec.MsgspecError as error:
            raise Damaged(f"its header does not decode: {error}") from None
        if not seal.sizes or len(seal.sums) != len(seal.sizes) or (seal.span is None and len(seal.sizes) != 2):
            raise Damaged(f"its header has {len(seal.sizes)} sizes and {len(seal.sums)} checksums")
        if file_size(seal) != self.nbytes:
            raise Damaged(f"its header stands for {file_size(seal)} bytes, the file has {self.nbytes}")
        return seal


def _mark_used(fd: int) -> None:
    # The clock that the file system uses by itself is too coarse to order files written one after another.
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _write_section(fd: int, section: memoryview, at: int) -> bytes:
    checksum = xxhash.xxh3_128()
    for start in range(0, len(section), PIECE):
        piece = section[start : start + PIECE]
        checksum.update(piece)
        _write_all(fd, piece, at + start)
    return checksum.digest()


def _write_all(fd: int, piece: memoryview, at: int) -> None:
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
                raise Damaged("it was cut short while it was read")
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
        if error.errno == errno.EIO:  # the medium has lost these bytes; trying again would not bring them back
            raise Damaged("the disk cannot read it") from error
        raise
