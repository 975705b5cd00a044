"""Writes what is known of chunks' sensitivity to the store, in the background, and reads it back."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from blendhub.contracts import Store
from blendhub.hub.index.namespace_index import Chunk, Saved
from blendhub.hub.limits import MOST_WAITING_NOTES


class Notes:
    """The queue of notes. A chunk whose bytes change again while it waits is written once. For the loop's thread."""

    def __init__(self, store: Store, saver: ThreadPoolExecutor, failed: Callable[[str, Exception], None]) -> None:
        """``saver`` is the thread that saves chunks, so that no note comes before its chunk."""
        self._store = store
        self._saver = saver
        self._failed = failed
        self._waiting: dict[Chunk, None] = {}
        self._writing: asyncio.Task[None] | None = None

    def write_soon(self, chunks: Iterable[Chunk]) -> None:
        """Write the notes of the saved chunks soon. The notes of other chunks are written when the chunks are saved."""
        for chunk in chunks:
            if chunk.sensitivity and chunk.saved is Saved.YES and len(self._waiting) < MOST_WAITING_NOTES:
                self._waiting[chunk] = None
        if self._waiting and self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    def read(self, chunk: Chunk) -> bytes | None:
        """The note of a chunk that the store has. Blocks."""
        try:
            return self._store.note(chunk.run.key, chunk.span)
        except Exception as error:
            self._failed("read the sensitivity of", error)
            return None

    def restore(self, chunk: Chunk, note: bytes | None) -> None:
        """Restore a note that was read, unless newer values were learned meanwhile."""
        if note and chunk.sensitivity is None and chunk.run.chunks.get(chunk.span.start) is chunk:
            chunk.run.index.keep_sensitivity(chunk, bytearray(note))

    async def finish(self) -> None:
        """Wait until everything is written."""
        if self._writing:
            await self._writing

    async def _write_all(self) -> None:
        while self._waiting:
            chunk = next(iter(self._waiting))
            del self._waiting[chunk]
            if chunk.sensitivity and chunk.saved is Saved.YES:
                note = bytes(chunk.sensitivity)
                try:
                    await asyncio.get_running_loop().run_in_executor(
                        self._saver, self._store.save_note, chunk.run.key, chunk.span, note
                    )
                except Exception as error:
                    self._failed("keep the sensitivity of", error)
        self._writing = None
