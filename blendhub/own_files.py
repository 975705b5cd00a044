"""Opens files by names that others may have taken: for a FIFO, a device or a link, or for files of their own."""

import errno
import os
import stat

_FOREIGN = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EISDIR}


class NotOurs(Exception):
    """A file is not one that this user's process has written; the message says what it is."""


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of a regular file of this user. Never waits, as for the other end of a FIFO, and follows no link.

    Raises NotOurs, or OSError if there is no such file or no file can be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _FOREIGN:
            raise NotOurs(f"it cannot be opened ({error.strerror})") from error
        raise
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        return fd
    os.close(fd)
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs("it is not a regular file")
    raise NotOurs(f"it belongs to uid {found.st_uid}")
