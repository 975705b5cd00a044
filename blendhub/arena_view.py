"""An arena as its users see it: mapped by name, and proven to be the one that the hub means."""

import mmap
import os
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub.errors import HubError, InvalidInput
from blendhub.processes import ProcessId

SHM = Path("/dev/shm")
HEADER_BYTES = 4096
"""The first memory page; slots follow it."""
MAGIC = b"BLENDHUB ARENA 1"


class ArenaName(msgspec.Struct, frozen=True):
    """Which segment, and how to be sure of it: a segment of another machine may have the same name."""

    segment: str
    nonce: str
    size: int


class Header(msgspec.Struct, frozen=True):
    name: ArenaName
    owner: ProcessId


def header_of(name: ArenaName, owner: ProcessId) -> bytes:
    text = msgspec.msgpack.encode(Header(name, owner))
    return MAGIC + len(text).to_bytes(4, "little") + text


def read_header(path: Path) -> Header:
    """Raises OSError or ValueError for what is no arena."""
    with path.open("rb") as file:
        page = file.read(HEADER_BYTES)
    length = int.from_bytes(page[len(MAGIC) : len(MAGIC) + 4], "little")
    if not page.startswith(MAGIC) or length > HEADER_BYTES:
        raise ValueError(f"{path} does not begin as an arena")
    return msgspec.msgpack.decode(page[len(MAGIC) + 4 : len(MAGIC) + 4 + length], type=Header)


class ArenaView:
    """The slots of an arena, mapped into this process."""

    def __init__(self, name: ArenaName) -> None:
        path = SHM / Path(name.segment).name
        try:
            if read_header(path).name != name:
                raise HubError(f"{path} is another hub's arena; is the hub on another machine?")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise HubError(f"cannot map the hub's arena {path}: {error}; is the hub on another machine?") from error
        try:
            memory = mmap.mmap(fd, HEADER_BYTES + name.size)
        finally:
            os.close(fd)
        self.name = name
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)[HEADER_BYTES:]
        """All slots; an offset in here is what pieces and slots are named by."""

    def slot(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, or of a part of one, in place."""
        if not 0 <= offset <= offset + size <= len(self.bytes):
            raise InvalidInput(f"[{offset}, {offset + size}) is not inside an arena of {len(self.bytes)} bytes")
        return self.bytes[offset : offset + size]
