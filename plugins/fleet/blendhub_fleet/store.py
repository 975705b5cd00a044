"""A shared store: a catalogue in Redis, and bytes in a place that other hubs reach."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from blendhub.contracts import ArenaFile, Changes, Deleted, Dropped, Published, RunKey, Share, SharedStore, StoredRun
from blendhub.contracts.transport import Buffer
from blendhub.core.bounded import put_last
from blendhub.core.errors import InvalidInput, StoreAway, StoreFailed
from blendhub.core.spans import Span
from blendhub.system.recurring import RecurringWarnings
from blendhub_fleet.bytes import ByteStore
from blendhub_fleet.catalogue import DELETED, DROPPED, PUBLISHED, Cursor, Entry, SharedCatalogue
from blendhub_fleet.moves import Fetched, Moves
from blendhub_fleet.options import FleetOptions
from blendhub_fleet.records import Record, decode, decode_record, encode_name, encode_record
from blendhub_fleet.scripts import MAX_DESCRIPTION_BYTES, MAX_TOKENS

log = logging.getLogger(__name__)
MAX_LENGTHS = 2**16
"""Runs whose lengths are remembered; tokens of others are published once more."""


class FleetStore(SharedStore):
    """A chunk is catalogued when its bytes are in their place, and its bytes are served when their checksums fit."""

    at_once = 32

    def __init__(self, options: FleetOptions, open_bytes: Callable[[ArenaFile], ByteStore]) -> None:
        self._options = options
        self._open_bytes = open_bytes
        self._catalogue = SharedCatalogue(options)
        self._moves: Moves | None = None
        self._unpublished: dict[RunKey, StoredRun] = {}
        """Runs that are published with their next chunk."""
        self._lengths: dict[RunKey, int] = {}
        """How many tokens of each of this object's own runs are published."""
        self._lock = threading.Lock()
        """Guards the two above, and the counters below."""
        self._corrupted = self._fetched = self._sent = self._gone = 0
        self._warnings = RecurringWarnings(log)
        self._closed = False

    @property
    def share(self) -> Share:
        return self._options.share

    @property
    def pace(self) -> float:
        return self._options.rate_mib_s * 2**20

    @property
    def nbytes(self) -> int:
        return self._catalogue.nbytes

    @property
    def capacity(self) -> int:
        return int(self._options.capacity_gib * 2**30)

    @property
    def corrupted(self) -> int:
        return self._corrupted

    def figures(self) -> dict[str, float]:
        return {
            "fetched_bytes": self._fetched,
            "sent_bytes": self._sent,
            "gone_chunks": self._gone,
            "catalogue_failures": self._catalogue.link.failures,
            "skipped_entries": self._catalogue.skipped,
            **(self._moves.stats() if self._moves else {}),
        }

    def attach(self, file: ArenaFile, memory: memoryview) -> None:
        self._check_open()
        self._moves = Moves(self._options.group, file, memory, self._open_bytes)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(StoreFailed):
            self._catalogue.leave()
        self._catalogue.link.close()
        if self._moves:
            self._moves.close()

    # Saving.

    def save_run(self, run: StoredRun) -> list[tuple[RunKey, Span]]:
        self._check_open()
        tokens, about = len(run.tokens) // 4, len(run.description)
        if tokens > MAX_TOKENS or about > MAX_DESCRIPTION_BYTES:  # which no other hub reads
            raise InvalidInput(
                f"{run.key} has {tokens} tokens and a description of {about} bytes; a run that is shared has at most "
                f"{MAX_TOKENS} and {MAX_DESCRIPTION_BYTES}, so this one stays with its hub"
            )
        stored = next((published.chunks for _, published in self._catalogue.runs([encode_name(run.key)])), ())
        if stored and 4 * stored[-1].end > len(run.tokens):
            raise InvalidInput(f"{run.key} has {stored[-1]} stored, but its new tokens end before; pass all")
        with self._lock:
            self._unpublished[run.key] = run
        return []

    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        return self.save_chunks(run, [(span, shards)])

    def save_chunks(self, run: RunKey, chunks: Sequence[tuple[Span, Sequence[Buffer]]]) -> list[tuple[RunKey, Span]]:
        try:
            return self._save_chunks(run, chunks)
        finally:
            with self._lock:  # what was not published may never come again, and would leave its tokens here
                self._unpublished.pop(run, None)

    def _save_chunks(self, run: RunKey, chunks: Sequence[tuple[Span, Sequence[Buffer]]]) -> list[tuple[RunKey, Span]]:
        moves = self._attached()
        spans = [span for span, _ in chunks]
        unpublished = self._check_tokens(run, max(span.end for span in spans))
        # Before the bytes move: a hub that is taken for dead meanwhile publishes nothing of this.
        incarnation = self._catalogue.incarnation
        if not incarnation:
            raise StoreAway("the hub has not joined the fleet yet, so it publishes nothing; does Redis run?")
        self._catalogue.link.check("write")
        records, stored = moves.put([shards for _, shards in chunks])
        kept = {span: record for span, record, whole in zip(spans, records, stored, strict=True) if whole}
        try:
            replaced = self._publish(incarnation, unpublished, run, kept) if kept else []
        except BaseException:
            moves.remove(records)
            raise
        moves.remove([record for record, whole in zip(records, stored, strict=True) if not whole])
        moves.remove(filter(None, map(_decoded, replaced)))
        with self._lock:
            self._sent += sum(sum(record.sizes) for record in kept.values())
        return [(run, span) for span in spans if span not in kept]

    def _check_tokens(self, run: RunKey, end: int) -> StoredRun | None:
        """The run if its tokens are still to be published; raises unless tokens cover what comes."""
        with self._lock:
            unpublished, published = self._unpublished.get(run), self._lengths.get(run, 0)
        n_tokens = len(unpublished.tokens) // 4 if unpublished else published
        if end > n_tokens:
            raise InvalidInput(f"{run} has {n_tokens} tokens here, a chunk of it ends at {end}; call save_run first")
        return unpublished

    def _publish(
        self, incarnation: str, unpublished: StoredRun | None, run: RunKey, kept: dict[Span, Record]
    ) -> list[bytes]:
        records = {span: encode_record(record) for span, record in kept.items()}
        try:
            replaced = self._catalogue.publish(incarnation, unpublished, run, records)
        except InvalidInput:
            with self._lock:
                self._lengths.pop(run, None)
            raise
        with self._lock:
            if unpublished:
                put_last(self._lengths, run, len(unpublished.tokens) // 4, MAX_LENGTHS)
        return replaced

    # Loading.

    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        return self.load_chunks([(run, span, into)])[0]

    def load_chunks(self, wanted: Sequence[tuple[RunKey, Span, Sequence[memoryview]]]) -> list[bool]:
        moves = self._attached()
        texts = self._catalogue.records([(key, span) for key, span, _ in wanted])
        records = {place: _decoded(text) for place, text in enumerate(texts) if text is not None}
        sound = {place: record for place, record in records.items() if record}
        for place, record in sound.items():
            run, span, into = wanted[place]
            if record.sizes != (sizes := tuple(map(len, into))):
                raise InvalidInput(
                    f"{span} of {run} was saved in shards of {list(record.sizes)} bytes, "
                    f"the buffers to load it into have {list(sizes)}; pass buffers of those sizes"
                )
        fetched = moves.get(list(sound.values()), [wanted[place][2] for place in sound])
        fates = dict.fromkeys(records, Fetched.UNKNOWN) | dict(zip(sound, fetched, strict=True))
        for place, fate in fates.items():
            if fate is not Fetched.WHOLE:
                self._drop(*wanted[place][:2], texts[place] or b"", fate)
        whole = [fates.get(place) is Fetched.WHOLE for place in range(len(wanted))]
        with self._lock:
            self._fetched += sum(sum(record.sizes) for place, record in sound.items() if whole[place])
        return whole

    def _drop(self, run: RunKey, span: Span, text: bytes, how: Fetched) -> None:
        """Drop a chunk for all. Where Redis does not take that, another hub finds out by itself."""
        with self._lock:
            self._gone += how is Fetched.GONE
            self._corrupted += how is not Fetched.GONE
        if how is not Fetched.GONE:
            self._warnings.warn(how, f"{span} of {run} is {how.value}; it is dropped for all hubs")
        with contextlib.suppress(StoreFailed):
            self._forget(run, span, text)

    def discard(self, run: RunKey, span: Span) -> None:
        self._attached()
        self._forget(run, span, b"")

    def _forget(self, run: RunKey, span: Span, text: bytes) -> None:
        dropped = self._catalogue.drop(run, {span: text})
        self._attached().remove(filter(None, map(_decoded, dropped)))

    def announce(self, deleted: Deleted) -> None:
        self._check_open()
        self._catalogue.announce(deleted)

    # Following.

    def runs(self) -> Iterator[StoredRun]:
        return self.snapshot()[0]

    def snapshot(self) -> tuple[Iterator[StoredRun], bytes]:
        self._check_open()
        cursor = self._catalogue.begin()
        runs = self._catalogue.runs(self._catalogue.names())
        return (run for _, run in runs), msgspec.msgpack.encode(cursor)

    def changes(self, cursor: bytes, timeout: float) -> Changes:
        self._check_open()
        deadline = time.monotonic() + timeout
        at = msgspec.msgpack.decode(cursor, type=Cursor)
        entries, reached = self._catalogue.entries(at)
        while not entries and (left := deadline - time.monotonic()) > 0:
            self._catalogue.wait(reached, left)
            entries, reached = self._catalogue.entries(reached)
        changes = tuple(self._changes(entries))
        return Changes(changes, msgspec.msgpack.encode(reached), self._catalogue.behind, self._catalogue.hubs)

    def _changes(self, entries: Sequence[Entry]) -> Iterator[Published | Dropped | Deleted]:
        """The changes in the entries of others. What was published and is gone already is left out."""
        others = _merged(entry for entry in entries if entry.writer not in self._catalogue.mine)
        runs = dict(self._catalogue.runs(dict.fromkeys(entry.name for entry in others if entry.kind == PUBLISHED)))
        for entry in others:
            if entry.kind == DELETED:
                if deleted := decode(entry.name, Deleted):
                    yield deleted
                continue
            run, key = runs.get(entry.name), decode(entry.name, RunKey)
            if key and entry.kind == DROPPED:
                yield Dropped(key, entry.spans)
            elif run and (chunks := tuple(span for span in run.chunks if span in entry.spans)):
                yield Published(msgspec.structs.replace(run, chunks=chunks))

    def _attached(self) -> Moves:
        self._check_open()
        if self._moves is None:
            raise StoreFailed("the store has no arena yet; call attach first")
        return self._moves

    def _check_open(self) -> None:
        if self._closed:
            raise StoreFailed(f"the store with the catalogue in {self._catalogue.link.place} is closed; open it again")


def _decoded(text: bytes) -> Record | None:
    """The record; None for an entry that no hub has written."""
    try:
        return decode_record(text)
    except ValueError:
        return None


def _merged(entries: Iterable[Entry]) -> list[Entry]:
    """The entries, with those that publish chunks of one run one after another made one."""
    merged: list[Entry] = []
    for entry in entries:
        before = merged[-1] if merged else None
        if before and entry.kind == before.kind == PUBLISHED and before.name == entry.name:
            merged[-1] = before._replace(spans=before.spans + entry.spans)
        else:
            merged.append(entry)
    return merged
