"""The store's directory: its lock, its file names, and how files are written and removed."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from blendhub.contracts import RunKey
from blendhub.core.errors import StoreFailed
from blendhub.core.spans import Span
from blendhub_stores.catalogue import Entry

log = logging.getLogger(__name__)
_OURS = re.compile(
    r"(?P<digest>[0-9a-f]{32})(\.run|-(?P<start>0|[1-9][0-9]*)-(?P<end>[1-9][0-9]*)\.kv)"
    r"(?P<draft>\.[0-9a-f]{16}\.tmp)?"
)
_REMEDIES = {
    errno.ENOSPC: "free space there, or give the store a smaller capacity",
    errno.EDQUOT: "free space there, or ask for a larger quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EACCES: "make it readable and writable for this user, or give the store another path",
    errno.EROFS: "mount it writable, or give the store another path",
}


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise failed("remove", path, error) from error


def failed(doing: str, path: str | Path, error: OSError) -> StoreFailed:
    """An error that names the failed operation, the path, and the next step."""
    remedy = _REMEDIES.get(error.errno or 0, "check that disk, or give the store another path")
    return StoreFailed(f"cannot {doing} {path}: {error.strerror or error}; {remedy}")


class File(NamedTuple):
    """A file of the store, as its name and the file system describe it."""

    path: str
    digest: str
    """The digest of the run's key."""
    span: Span | None
    nbytes: int
    used_ns: int


class Directory:
    """A directory that belongs to one store object at a time.

    File names are made from digests, so that no name chosen by a peer leads out of the directory. Files with other
    names are left alone, so that a wrong ``path`` destroys no files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(path)
        except OSError as error:
            raise failed("use the directory", path, error) from error

    def close(self) -> None:
        os.close(self._lock)

    def file_of(self, entry: Entry) -> str:
        key, span = entry
        digest = digest_of(key)
        name = f"{digest}.run" if span is None else f"{digest}-{span.start}-{span.end}.kv"
        return f"{self.path}/{digest[:2]}/{name}"

    @contextlib.contextmanager
    def draft_of(self, entry: Entry) -> Iterator[str]:
        """A unique path beside the entry's file; a file left there at the end of the block is removed."""
        file = self.file_of(entry)
        draft = f"{file}.{secrets.token_hex(8)}.tmp"
        try:
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            yield draft
        except OSError as error:
            raise failed("write", file, error) from error
        finally:
            self.unlink(draft)

    def files(self) -> Iterator[File]:
        """Every regular file of this user with a name of the store; removes drafts that a crash left."""
        for folder in self._folders():
            with os.scandir(folder) as files:
                for file in files:
                    ours = _OURS.fullmatch(file.name)
                    if ours is None or not file.name.startswith(folder.name):
                        continue
                    facts = file.stat(follow_symlinks=False)
                    start, end = ours["start"], ours["end"]
                    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                        log.warning("skipped %s: it is not a regular file of this user", file.path)
                    elif ours["draft"]:
                        self.unlink(file.path)
                    elif start is None or int(start) < int(end):
                        span = Span(int(start), int(end)) if start else None
                        yield File(file.path, ours["digest"], span, facts.st_size, facts.st_mtime_ns)

    def _folders(self) -> Iterator[Path]:
        for folder in sorted(self.path.glob("[0-9a-f][0-9a-f]")):
            facts = folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or not os.access(folder, os.R_OK):
                log.warning("skipped %s: it is not a directory that this user owns and can read", folder)
            else:
                yield folder

    def unlink(self, path: str) -> None:
        """Remove a file if it exists. A failure is logged, not raised: the caller could do nothing about it."""
        try:
            _unlink(path)
        except StoreFailed as error:
            log.warning("%s", error)

    def remove(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.unlink(self.file_of(entry))

    def delete(self, entry: Entry) -> None:
        """Remove an entry's file if it exists; raises StoreFailed if the file stays."""
        _unlink(self.file_of(entry))

    def fsync_name_of(self, path: str) -> None:
        """Wait until the file's name is on disk. A failure is only logged: it may cost one chunk at a power cut."""
        for folder in (os.path.dirname(path), self.path):
            try:
                fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                log.warning("%s", failed("sync the directory", folder, error))


def digest_of(key: RunKey) -> str:
    # The length keeps ("ab", "c") and ("a", "bc") apart.
    namespace = key.namespace.encode()
    text = len(namespace).to_bytes(8, "little") + namespace + key.run.encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _lock(path: Path) -> int:
    """Lock the directory until the descriptor is closed or the process ends for any reason."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path / "lock", flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreFailed(
            f"{path} is in use by the process with pid {owner}; stop that process, or give this store another path"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd
