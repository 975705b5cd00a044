"""A client's view of an arena: mapped by name, and checked to be the hub's."""

import mmap
import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from blendhub.core.errors import HubError, InvalidInput
from blendhub.system.file_locks import lock_byte

SHM = Path("/dev/shm")
HEADER_BYTES = 4096
"""The first memory page; slots follow it."""
MAGIC = b"BLENDHUB ARENA 2"
LARGEST_ARENA = 2**50
MappingId = Annotated[int, Meta(ge=LARGEST_ARENA + HEADER_BYTES, le=2**62)]
"""The name of an arena's mapping: the byte of its file, far behind its end, that is locked while the mapping lasts."""


class ArenaName(msgspec.Struct, frozen=True):
    """Identifies a segment: another machine may have a segment of the same name, but not with the same nonce."""

    segment: Annotated[str, Meta(pattern=r"^blendhub-\d+-[0-9a-f]{16}$")]
    nonce: Annotated[str, Meta(max_length=64)]
    size: Annotated[int, Meta(ge=0, le=LARGEST_ARENA)]


def header_of(name: ArenaName) -> bytes:
    text = msgspec.msgpack.encode(name)
    return MAGIC + len(text).to_bytes(4, "little") + text


def read_header(fd: int) -> ArenaName:
    """Raises OSError, ValueError or MsgspecError if the file is not an arena."""
    page = os.pread(fd, HEADER_BYTES, 0)
    length = int.from_bytes(page[len(MAGIC) : len(MAGIC) + 4], "little")
    if not page.startswith(MAGIC) or length > HEADER_BYTES:
        raise ValueError("it does not begin as an arena")
    return msgspec.msgpack.decode(page[len(MAGIC) + 4 : len(MAGIC) + 4 + length], type=ArenaName)


class ArenaView:
    """The slots of an arena, mapped into this process.

    The mapping lasts until the last array over it is gone, in this process and in those forked from it. As long as it
    does, the hub sees the lock that belongs to it, and gives no slot to another that this process may still write.
    """

    def __init__(self, name: ArenaName) -> None:
        path = SHM / Path(name.segment).name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _cannot_map(path, error) from error
        try:
            if read_header(fd) != name:
                raise HubError(f"{path} is another hub's arena; is the hub on another machine?")
            self.mapping = _lock_some_byte(fd)
            memory = mmap.mmap(fd, HEADER_BYTES + name.size)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise _cannot_map(path, error) from error
        finally:
            os.close(fd)
        self.name = name
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[HEADER_BYTES:]
        """All slots. Messages name slots by their offsets in here."""

    def slot(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, or of a part of one, in place."""
        if not 0 <= offset <= offset + size <= len(self.bytes):
            raise InvalidInput(f"[{offset}, {offset + size}) is not inside an arena of {len(self.bytes)} bytes")
        return self.bytes[offset : offset + size]

    def release(self) -> None:
        """Drop this view's slots; other arrays over the mapping may still keep the mapping alive."""
        self.bytes = self.bytes[:0].copy()


def _lock_some_byte(fd: int) -> int:
    while True:
        at = LARGEST_ARENA + HEADER_BYTES + secrets.randbits(61)
        try:
            lock_byte(fd, at)
        except BlockingIOError:
            continue
        return at


def _cannot_map(path: Path, error: Exception) -> HubError:
    return HubError(f"cannot map the hub's arena {path}: {error}; is the hub on another machine?")
