"""Bytes as files below one directory that every hub of the group mounts, by NFS or otherwise."""

import contextlib
import mmap
import secrets
from pathlib import Path

from blendhub.contracts import ArenaFile
from blendhub.errors import OptionError, StoreFailed
from blendhub_fleet.bytes import Bytes, Extent
from blendhub_fleet.options import DirectoryOptions
from blendhub_fleet.store import FleetStore


class DirectoryBytes(Bytes):
    """A file for each key. A file that somebody removes is a miss."""

    def __init__(self, folder: Path, arena: ArenaFile) -> None:
        self._folder = folder
        with open(arena.path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), arena.slots_at + arena.size)
        self._slots_at = arena.slots_at

    def put(self, keys: list[str], extents: list[Extent]) -> list[bool]:
        try:
            for key, extent in zip(keys, extents, strict=True):
                self._write(self._file(key), self._slice(extent))
        except OSError as error:
            raise self._failed("write", error) from error
        return [True] * len(keys)

    def get(self, keys: list[str], extents: list[Extent]) -> list[bool]:
        try:
            return [self._read(self._file(key), self._slice(extent)) for key, extent in zip(keys, extents, strict=True)]
        except OSError as error:
            raise self._failed("read", error) from error

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self._file(key).unlink()

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view of a call that another thread still makes
            self._memory.close()

    def _file(self, key: str) -> Path:
        group, name, rank = key.split("/")
        return self._folder / group / name[:2] / f"{name}-{rank}.kv"

    def _slice(self, extent: Extent) -> memoryview:
        start, size = extent
        return memoryview(self._memory)[self._slots_at + start : self._slots_at + start + size]

    def _write(self, file: Path, content: memoryview) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{secrets.token_hex(8)}.draft")
        try:
            draft.write_bytes(content)
            draft.rename(file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _read(self, file: Path, into: memoryview) -> bool:
        try:
            with file.open("rb", buffering=0) as source:
                filled = 0
                while filled < len(into) and (got := source.readinto(into[filled:])):
                    filled += got
        except FileNotFoundError:
            return False
        return filled == len(into)

    def _failed(self, doing: str, error: OSError) -> StoreFailed:
        place = error.filename or self._folder
        return StoreFailed(f"cannot {doing} {place}: {error.strerror}; is it mounted, and has it room?")


def open_store(options: DirectoryOptions) -> FleetStore:
    if not options.path:
        raise OptionError("the store 'shared_directory' needs path: a directory that every hub of the group mounts")
    folder = Path(options.path).expanduser().absolute()
    return FleetStore(options, lambda arena: DirectoryBytes(folder, arena))
