"""The disk store: one file a chunk and one a run, each whole or absent, within a capacity."""

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput, StoreFailed
from blendhub.core.spans import Span
from blendhub.system.default_paths import default_disk_store
from blendhub.system.safe_open import NotOurs
from blendhub_stores.catalogue import Catalogue, Entry, EntryVersion
from blendhub_stores.directory import Directory, failed
from blendhub_stores.file_format import Damaged, StoreFile, file_size, new_header, write
from blendhub_stores.options import DiskOptions
from blendhub_stores.scan import scan

log = logging.getLogger(__name__)
T = TypeVar("T")


class DiskStore(Store):
    """Bytes are read and written without the lock; a save takes effect, or is refused, when its file is renamed.

    The order of use is kept in the files' modification times, so it survives a restart.
    """

    def __init__(self, options: DiskOptions) -> None:
        self._fsync = options.fsync
        self._catalogue = Catalogue(int(options.capacity_gib * 2**30))
        self._writes_under_way = 0
        self._closed = False
        self._changed = threading.Condition()
        """Guards the three attributes above and the names of files; only ``close`` waits on it."""
        self._directory = Directory(Path(options.path or default_disk_store()).expanduser().absolute())
        try:
            self._corrupted = scan(self._directory, self._catalogue)
            self._warn_if_the_disk_is_smaller()
        except BaseException as error:
            self._directory.close()
            if isinstance(error, OSError):
                raise failed("read the directory", self._directory.path, error) from error
            raise

    def save_run(self, run: StoredRun) -> list[tuple[RunKey, Span]]:
        return self._keep((run.key, None), [run.tokens, run.description])

    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        return self._keep((run, span), shards)

    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        if self._use((run, span), lambda file: file.fill(into)) is None:
            return False
        with self._changed:
            if self._catalogue.version((run, span)):
                self._catalogue.touch((run, span))
        return True

    def discard(self, run: RunKey, span: Span) -> None:
        with self._changed:
            self._check_open()
            # Before the catalogue forgets it: what stays can be discarded again.
            self._directory.delete((run, span))
            if self._catalogue.chunks(run) == [span]:
                self._directory.delete((run, None))
            self._catalogue.discard((run, span))

    def runs(self) -> Iterator[StoredRun]:
        with self._changed:
            self._check_open()
            keys = list(self._catalogue)
        return (run for key in keys if (run := self._read_run(key)))

    @property
    def nbytes(self) -> int:
        return self._catalogue.nbytes

    @property
    def capacity(self) -> int:
        return self._catalogue.capacity

    @property
    def corrupted(self) -> int:
        return self._corrupted

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: not self._writes_under_way)
            self._directory.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreFailed(f"the store at {self._directory.path} is closed; open it again")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """While the block runs, ``close`` waits before it unlocks the directory."""
        with self._changed:
            self._check_open()
            self._writes_under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._writes_under_way -= 1
                self._changed.notify_all()

    def _keep(self, entry: Entry, sections: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        header = new_header(*entry, sections)
        nbytes, n_tokens = file_size(header), header.sizes[0] // 4
        with self._writing():
            with self._changed:
                self._victims(entry, nbytes, n_tokens)  # refuse an entry that does not fit before writing it
            with self._directory.draft_of(entry) as draft:
                write(draft, header, sections, fsync=self._fsync)
                with self._changed:
                    victims = self._victims(entry, nbytes, n_tokens)
                    os.rename(draft, self._directory.file_of(entry))
                    dropped = self._publish(entry, nbytes, n_tokens, victims)
            if self._fsync:
                self._directory.fsync_name_of(self._directory.file_of(entry))
        return dropped

    def _victims(self, entry: Entry, nbytes: int, n_tokens: int) -> list[Entry]:
        """The entries to drop so that this one fits; raises if it is not allowed, or does not fit at all."""
        key, span = entry
        if span is None:
            stored = self._catalogue.chunks(key)
            if stored and stored[-1].end > n_tokens:
                raise InvalidInput(f"{key} has {stored[-1]} stored, but its new tokens end at {n_tokens}; pass all")
        else:
            stored_tokens = self._catalogue.n_tokens(key)
            if stored_tokens is None:
                raise InvalidInput(f"{key} is not stored, so {span} of it cannot be; call save_run first")
            if span.end > stored_tokens:
                raise InvalidInput(
                    f"{span} ends beyond the {stored_tokens} tokens of {key}; call save_run with more first"
                )
        return self._catalogue.victims(entry, nbytes)

    def _publish(self, entry: Entry, nbytes: int, n_tokens: int, victims: list[Entry]) -> list[tuple[RunKey, Span]]:
        key, span = entry
        if span is None:
            self._catalogue.put_run(key, nbytes, n_tokens)
        else:
            self._catalogue.put_chunk(key, span, nbytes)
        gone = [lost for victim in victims for lost in self._catalogue.discard(victim, keep=key)]
        self._directory.remove(gone)
        return [(run, chunk) for run, chunk in gone if chunk is not None]

    def _use(self, entry: Entry, use: Callable[[StoreFile], T]) -> T | None:
        """The result of ``use`` on the entry's file; None if the file is missing, or damaged and therefore dropped."""
        with self._changed:
            self._check_open()
            version = self._catalogue.version(entry)
        if version is None:
            return None
        path = self._directory.file_of(entry)
        try:
            with StoreFile(path) as file:
                if (file.header.key, file.header.span) != entry:
                    raise Damaged("it holds another entry's bytes")
                return use(file)
        except (Damaged, FileNotFoundError) as error:
            self._drop_damaged(entry, version, error)
            return None
        except NotOurs as error:
            raise StoreFailed(f"cannot read {path}: {error}; remove it, or give the store another path") from error
        except OSError as error:
            raise failed("read", path, error) from error

    def _drop_damaged(self, entry: Entry, version: EntryVersion, error: Exception) -> None:
        with self._changed:
            if self._catalogue.version(entry) is not version:
                return  # another thread discarded or replaced the entry meanwhile
            self._corrupted += 1
            self._directory.remove(self._catalogue.discard(entry))
        log.warning("dropped the damaged entry %s: %s", self._directory.file_of(entry), error)

    def _read_run(self, key: RunKey) -> StoredRun | None:
        with self._changed:
            # Before the tokens: chunks are saved after tokens that cover them, so tokens read now cover these.
            chunks = self._catalogue.chunks(key)
        sections = self._use((key, None), StoreFile.sections) if chunks else None
        if not sections:
            return None
        tokens, description = sections
        return StoredRun(key, tokens, description, tuple(chunks))

    def _warn_if_the_disk_is_smaller(self) -> None:
        room = shutil.disk_usage(self._directory.path).free + self.nbytes
        if self.capacity > room:
            log.warning(
                "capacity_gib lets %s hold %.1f GiB, but its disk has room for %.1f; set it below that",
                self._directory.path, self.capacity / 2**30, room / 2**30,
            )  # fmt: skip
