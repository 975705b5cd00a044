"""Locks on bytes of a file that the kernel keeps for as long as any process holds the open file, or a mapping of it.

These are Linux's open file description locks. A forked child shares its parent's, and a process in another pid
namespace is seen like any other: what they tell, a pid could not.
"""

import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi")
"""``struct flock``: type, whence, start, length, pid."""


def lock_byte(fd: int, at: int) -> None:
    """Lock a byte, which may lie behind the end of the file. Raises BlockingIOError if another holds it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(at))


def is_byte_locked(fd: int, at: int) -> bool:
    """Whether another open file description than ``fd`` holds a lock on the byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(at))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _request(at: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
