"""Bytes as files below one directory that every hub of the group mounts, by NFS or otherwise."""

import contextlib
import errno
import grp
import io
import mmap
import os
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from blendhub.contracts import ArenaFile
from blendhub.core.errors import OptionError, StoreAway, StoreFailed
from blendhub.system.safe_open import NoFile, NotOurs, open_own
from blendhub_fleet.bytes import ByteStore, Extent
from blendhub_fleet.options import DirectoryOptions
from blendhub_fleet.store import FleetStore
from blendhub_fleet.watched import Watched, WatchedWork

CopyBuffer: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"
PIECE = 2**20
"""Bytes that are copied at a time: few enough to stay in the processor's cache between file and arena."""
FLUSHED = 16 * PIECE
_AWAY = {errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EIO}
"""The errors of a file system whose server does not answer."""


class DirectoryBytes(ByteStore):
    """A file for each key. A file that somebody has removed or replaced is a miss.

    A mount may hang for ever, and with it a thread that reads there. So threads read into private memory, and
    what they read goes into the arena only while the call is waited for.
    """

    def __init__(self, folder: "Folder", arena: ArenaFile, silence_s: float) -> None:
        self._folder = folder
        self._watched = Watched(str(folder.path), silence_s)
        with open(arena.path, "r+b") as file:
            self._memory = np.frombuffer(mmap.mmap(file.fileno(), arena.slots_at + arena.size), np.uint8)
        self._slots_at = arena.slots_at

    def put(self, keys: list[str], extents: list[Extent]) -> list[bool]:
        content = dict(zip(keys, map(self._slice, extents), strict=True))

        def put_all(work: WatchedWork[list[bool]]) -> list[bool]:
            try:
                for key, piece in content.items():
                    self._folder.write(key, piece, work)
            except BaseException:
                self._folder.remove(keys)
                raise
            return [True] * len(keys)

        with self._failing("write"):
            return self._watched.run(put_all)

    def get(self, keys: list[str], extents: list[Extent]) -> list[bool]:
        into = dict(zip(keys, map(self._slice, extents), strict=True))

        def get_all(work: WatchedWork[list[bool]]) -> list[bool]:
            return [self._folder.read(key, piece, work) for key, piece in into.items()]

        with self._failing("read"):
            return self._watched.run(get_all)

    def remove(self, keys: list[str]) -> None:
        self._watched.run(lambda work: self._folder.remove(keys))

    def stats(self) -> dict[str, float]:
        return {"directory_hung_calls": float(self._watched.hung)}

    def close(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def _slice(self, extent: Extent) -> CopyBuffer:
        start, size = extent
        return self._memory[self._slots_at + start : self._slots_at + start + size]

    @contextlib.contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (NotOurs, PermissionError) as error:
            raise StoreFailed(
                f"cannot {doing} below {self._folder.path}: {error}; run all hubs of the group as one user, or set "
                "unix_group to a group of them all"
            ) from error
        except OSError as error:
            place = error.filename or self._folder.path
            kind = StoreAway if error.errno in _AWAY else StoreFailed
            raise kind(f"cannot {doing} {place}: {error.strerror}; is it mounted, and has it room?") from error


class Folder:
    """The files of one group of hubs. Nobody else may read them: KV tells the text that it was computed from."""

    def __init__(self, path: Path, unix_group: int | None) -> None:
        self.path = path
        self._group = unix_group
        self._owner: int | None = None
        """The uid that this user's files have here, which a server may map to another one. None: not known yet."""

    def write(self, key: str, content: CopyBuffer, work: WatchedWork[list[bool]]) -> None:
        """Write a file, whole or not at all."""
        self._prepare()
        file = self._file(key)
        try:
            self._make(file.parent)
        except FileNotFoundError:  # the folder was removed, or another file system was mounted here
            self._owner = None
            self._prepare()
            self._make(file.parent)
        with self._draft(file.parent) as draft:
            for start in range(0, len(content), PIECE):
                left = content[start : start + PIECE].data
                while left:
                    left = left[draft.write(left) :]
                if start and start % FLUSHED == 0:  # else the file's end would wait for all of it
                    os.fdatasync(draft.fileno())
                work.step()
            draft.close()  # which some file systems write with
            work.step()
            os.rename(draft.name, file)
            work.step()

    def read(self, key: str, into: CopyBuffer, work: WatchedWork[list[bool]]) -> bool:
        """Fill memory with a file, as long as the work is waited for. False: there is no file of that many bytes."""
        self._prepare()
        piece = np.empty(min(PIECE, len(into)), np.uint8)
        try:
            fd = open_own(self._file(key), os.O_RDONLY, owner=self._owner, group=self._group)
        except (FileNotFoundError, NoFile):
            return False
        try:
            for start in range(0, len(into), PIECE):
                part = into[start : start + PIECE]
                if not _fill(fd, piece[: len(part)].data):
                    return False
                work.step(partial(np.copyto, part, piece[: len(part)]))
        finally:
            os.close(fd)
        return True

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self._file(key).unlink()

    def _file(self, key: str) -> Path:
        _, name, rank = key.split("/")
        return self.path / name[:2] / f"{name}-{rank}.kv"

    def _prepare(self) -> None:
        """Make the folder, and learn by a first file whether this user may use it."""
        if self._owner is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._make(self.path)
            with self._draft(self.path) as draft:
                owner = os.fstat(draft.fileno()).st_uid
            facts = self.path.lstat()
            if facts.st_uid != owner and facts.st_gid != self._group:
                raise NotOurs(f"{self.path} belongs to uid {facts.st_uid}")
            mode = 0o700 if self._group is None else 0o2770
            if facts.st_mode & 0o7777 & ~mode:  # made by an earlier release, or by hand
                os.chmod(self.path, mode)
            self._owner = owner

    def _make(self, folder: Path) -> None:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            if self._group is not None:
                os.chown(folder, -1, self._group)
                os.chmod(folder, 0o2770)

    @contextlib.contextmanager
    def _draft(self, folder: Path) -> Iterator[io.FileIO]:
        """A new file; it is removed unless the block renames it."""
        name = f"{folder}/{secrets.token_hex(8)}.draft"
        with io.FileIO(name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as draft:
            try:
                if self._group is not None:
                    os.fchown(draft.fileno(), -1, self._group)
                    os.fchmod(draft.fileno(), 0o640)
                yield draft
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(name)


def _fill(fd: int, view: memoryview) -> bool:
    """Whether the file had so many bytes left."""
    while view:
        got = os.readv(fd, [view])
        if not got:
            return False
        view = view[got:]
    return True


def open_store(options: DirectoryOptions) -> FleetStore:
    path, name, group = Path(options.path).expanduser().absolute() / options.group, options.unix_group, None
    try:
        if name:
            group = int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise OptionError(
            f"unix_group: this machine has no group {name!r}; give one of /etc/group, or its number"
        ) from None
    folder = Folder(path, group)
    return FleetStore(options, lambda arena: DirectoryBytes(folder, arena, options.transfer_deadline_s))
