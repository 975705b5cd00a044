"""Opens files by names that others may have taken: for a FIFO, a device or a link, or for files of their own."""

import errno
import os
import stat

_NO_FILES = {errno.ELOOP, errno.ENXIO, errno.EISDIR}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM}


class NotOurs(Exception):
    """A file is not one that this user's process has written; the message says what it is."""


class NoFile(NotOurs):
    """The name is not that of a regular file."""


def open_own(path: str | os.PathLike[str], flags: int, *, owner: int | None = None, group: int | None = None) -> int:
    """A descriptor of a regular file of this user. Never waits, as for the other end of a FIFO, and follows no link.

    ``owner`` is the uid that a file system shows for this user's files, if it is another one. With ``group``, files of
    that group are as good. Raises NotOurs, or OSError if there is no such file or no file can be opened.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NO_FILES:
            raise NoFile(f"it cannot be opened as a file ({error.strerror})") from error
        if error.errno in _NOT_ALLOWED:
            raise NotOurs(f"it cannot be opened ({error.strerror})") from error
        raise
    found = os.fstat(fd)
    ours = found.st_uid == (os.geteuid() if owner is None else owner) or found.st_gid == group
    if stat.S_ISREG(found.st_mode) and ours:
        return fd
    os.close(fd)
    if not stat.S_ISREG(found.st_mode):
        raise NoFile("it is not a regular file")
    raise NotOurs(f"it belongs to uid {found.st_uid}")
