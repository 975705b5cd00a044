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

from blendhub.contracts import ArenaProgress
from blendhub.core.errors import HubError, InvalidInput
from blendhub.system.file_locks import lock_byte

SHM = Path("/dev/shm")
HEADER_BYTES = 4096
"""The first memory page; slots follow it."""
MAGIC = b"BLENDHUB ARENA 1"
PROGRESS_AT = HEADER_BYTES - 16
"""Where the header has two numbers of 64 bits: the bytes of slots that are reserved, and those that will be."""

LARGEST_ARENA = 2**50
SHM_ADVICE = (
    "for a container, --shm-size=16g; in Kubernetes, an emptyDir volume with medium: Memory at /dev/shm; elsewhere, "
    "mount -o remount,size=16G /dev/shm"
)
"""How shared memory is made larger."""

MappingId = Annotated[int, Meta(ge=LARGEST_ARENA + HEADER_BYTES, le=2**62)]
"""The name of an arena's mapping: the byte of its file, far behind its end, that is locked while the mapping lasts."""


class ArenaName(msgspec.Struct, frozen=True):
    """Identifies a segment: another container may have a segment of the same name, but not with the same nonce."""

    segment: Annotated[str, Meta(pattern=r"^blendhub-\d+-[0-9a-f]{16}$")]
    nonce: Annotated[str, Meta(max_length=64)]
    size: Annotated[int, Meta(ge=0, le=LARGEST_ARENA)]
    """The bytes of slots that the arena is to have."""


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


def read_progress(fd: int) -> ArenaProgress:
    """Raises OSError, ValueError or MsgspecError if the file is not an arena."""
    read_header(fd)
    reserved, goal = np.frombuffer(os.pread(fd, 16, PROGRESS_AT), np.uint64).tolist()
    return ArenaProgress(reserved, goal)


class ArenaView:
    """The slots of an arena, mapped into this process. The hub reserves them step by step while it serves.

    The mapping lasts until the last array over it is gone, in this process and in those forked from it. Until
    then the hub sees the lock of the mapping, and gives no slot that this process may still write to another process.
    """

    def __init__(self, name: ArenaName) -> None:
        path = SHM / Path(name.segment).name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _cannot_map(path, error) from error
        try:
            if read_header(fd) != name:
                raise ValueError("it is another hub's arena")
            self.mapping = _lock_some_byte(fd)
            memory = mmap.mmap(fd, HEADER_BYTES + name.size)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise _cannot_map(path, error) from error
        finally:
            os.close(fd)
        self.name = name
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[HEADER_BYTES:]
        """All slots. Messages name slots by their offsets in here, and only slots that are reserved."""
        self._progress = np.frombuffer(memory, np.uint64, 2, PROGRESS_AT)

    def progress(self) -> ArenaProgress:
        """How far the hub has reserved the arena by now; of a hub that has ended, how far it came."""
        return ArenaProgress(*self._progress.tolist())

    def slot(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, or of a part of one, in place."""
        if not 0 <= offset <= offset + size <= len(self.bytes):
            raise InvalidInput(f"[{offset}, {offset + size}) is not inside an arena of {len(self.bytes)} bytes")
        return self.bytes[offset : offset + size]

    def release(self) -> None:
        """Drop this view's slots; other arrays over the mapping may still keep the mapping alive."""
        self.bytes, self._progress = self.bytes[:0].copy(), self._progress.copy()


def _lock_some_byte(fd: int) -> int:
    while True:
        at = LARGEST_ARENA + HEADER_BYTES + secrets.randbits(61)
        try:
            lock_byte(fd, at)
        except BlockingIOError:
            continue
        return at


def _cannot_map(path: Path, error: Exception) -> HubError:
    why = error.strerror if isinstance(error, OSError) else str(error)
    return HubError(
        f"cannot map the hub's arena {path}: {why}. Hub and engines need one /dev/shm and one user: on this machine or "
        "with docker run --ipc=host, or with one volume at /dev/shm in their containers"
    )
