"""The catalogue: runs and their chunks in Redis, and the log of what changed."""

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from blendhub.contracts import Deleted, RunKey, StoredRun
from blendhub.core.errors import CursorLost
from blendhub.core.spans import Span
from blendhub.system.recurring import RecurringWarnings
from blendhub_fleet import scripts
from blendhub_fleet.link import BLOCK_S, Link
from blendhub_fleet.options import FleetOptions
from blendhub_fleet.records import decode, decode_spans, encode_name, encode_spans

MEMBER_S = 15.0
"""A hub that is silent for so long counts as dead."""
CHANGES_AT_ONCE = 64
PUBLISHED, DROPPED, DELETED = b"p", b"d", b"x"
"""The kinds of changes in the log."""
RUNS_AT_ONCE = 8
"""Few: the hub's loop has Python's lock while the next ones are on their way."""
SCAN_COUNT = 1000
MAX_CHANGE_BYTES = 8 * scripts.MAX_CHUNKS
log = logging.getLogger(__name__)


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """A place in the log."""

    life: str
    """Redis's life: it changes when Redis is started again, or emptied, because changes may be lost then."""
    seq: int


class Entry(NamedTuple):
    """One change of the log."""

    writer: str
    kind: bytes
    """One of ``PUBLISHED``, ``DROPPED`` and ``DELETED``."""
    name: bytes
    """The run's name, or what is deleted."""
    spans: tuple[Span, ...]

    @property
    def is_sound(self) -> bool:
        """Whether a hub may have written it."""
        if self.kind == DELETED:
            return decode(self.name, Deleted) is not None
        return self.kind in (PUBLISHED, DROPPED) and bool(self.spans) and decode(self.name, RunKey) is not None


class SharedCatalogue:
    """Called from several threads at once; ``begin``, ``entries`` and ``wait`` from one."""

    def __init__(self, options: FleetOptions) -> None:
        self.link = Link(options.catalogue, options.deadline_s)
        self.incarnation = ""
        """The name of this hub among the others, since it joined; a new one each time."""
        self.mine: set[str] = set()
        self.hubs = self.nbytes = self.seq = self.behind = 0
        """The state that Redis reported last: the live hubs, the catalogued bytes, and the last change."""
        self.skipped = 0
        """Runs and changes that no hub has written so."""
        self._prefix = f"blendhub:{{{options.group}}}:"
        self._options = options
        self._scripts: dict[str, Any] = {}
        self._warnings = RecurringWarnings(log)

    # Following.

    def begin(self) -> Cursor:
        """A cursor at the end of the log."""
        answer = self._follow(Cursor("", 0))
        return Cursor(answer[1].decode(), self.seq)

    def entries(self, cursor: Cursor) -> tuple[list[Entry], Cursor]:
        """Changes after a cursor, in order. Raises CursorLost if some are not known any more."""
        answer = self._follow(cursor)
        if answer[0] == b"lost":
            raise CursorLost(f"{self.link.place} has not all changes after {cursor.seq}, up to {self.seq}")
        entries = []
        reached = cursor.seq
        for id, writer, kind, name, spans in answer[4]:
            reached += 1
            if id != b"%d-0" % reached:
                raise CursorLost(f"change {reached} is missing in the log of {self.link.place}")
            entry = Entry(writer.decode(errors="replace"), kind, name, tuple(decode_spans(spans)))
            if entry.is_sound:
                entries.append(entry)
            else:
                self._skip(f"change {reached} of the log")
        self.behind = self.seq - reached
        return entries, Cursor(cursor.life, reached)

    def wait(self, cursor: Cursor, timeout: float) -> None:
        """Wait until the log goes on behind the cursor; at most a second, and not less than a moment."""
        block = max(1, int(1000 * min(timeout, BLOCK_S)))
        self.link.wait(lambda redis: redis.xread({self._prefix + "log": f"{cursor.seq}-0"}, count=1, block=block))

    def leave(self) -> None:
        if self.incarnation:
            self._run("LEAVE", "write", self.incarnation)

    # Runs.

    def names(self) -> Iterator[bytes]:
        """The names of all runs. One that comes or goes meanwhile may be missing, or come twice."""

        def scan(redis: Any, position: int) -> Any:
            return redis.zscan(self._prefix + "runs", position, count=SCAN_COUNT)

        position = 0
        while True:
            position, scored = self.link.do("read", partial(scan, position=position))
            yield from (name for name, _ in scored)
            if not position:
                return

    def runs(self, names: Iterable[bytes]) -> Iterator[tuple[bytes, StoredRun]]:
        """The catalogued runs with these names, with all their chunks."""
        names = iter(names)
        most = (4 * scripts.MAX_TOKENS, scripts.MAX_CHUNKS, scripts.MAX_DESCRIPTION_BYTES)
        asked: list[bytes] = []
        while asked := asked or list(islice(names, RUNS_AT_ONCE)):
            answers = self._run("RUNS", "read", *most, scripts.MAX_ANSWERED_BYTES, *asked)
            for name, answer in zip(asked, answers, strict=False):
                run = _run_of(name, answer)
                if run:
                    yield name, run
                elif answer or decode(name, RunKey) is None:
                    self._skip(f"the run {name[:100]!r}")
            asked = asked[len(answers) :]

    def _skip(self, what: str) -> None:
        self.skipped += 1
        self._warnings.warn(
            "skipped",
            f"{what} in {self.link.place} is not as a hub writes it, so it is skipped; what else writes to "
            f"{self._prefix}*?",
        )

    def records(self, wanted: Sequence[tuple[RunKey, Span]]) -> list[bytes | None]:
        """The records of chunks; None for those that are not catalogued. This is a use of their runs."""
        pairs = [part for key, span in wanted for part in (encode_name(key), encode_spans([span]))]
        texts: list[bytes | None] = self._run("RECORDS", "read", self.seq, scripts.MAX_RECORD_BYTES, *pairs)
        return texts

    def publish(self, incarnation: str, run: StoredRun | None, key: RunKey, chunks: dict[Span, bytes]) -> list[bytes]:
        """Catalogue chunks with their records, and the run's tokens if given; returns the records that are no more.

        Raises InvalidInput if the run is not catalogued, and not given. ``incarnation`` is that of when the bytes began
        to move.
        """
        pairs = [part for span, record in chunks.items() for part in (encode_spans([span]), record)]
        tokens, about = (run.tokens, run.description) if run else (b"", b"")
        limits = (int(self._options.capacity_gib * 2**30), self._options.log_length)
        spans = encode_spans(sorted(chunks))
        about_run = (encode_name(key), tokens, about)
        texts: list[bytes] = self._run("PUBLISH", "write", incarnation, *about_run, *limits, spans, *pairs)
        return texts

    def drop(self, key: RunKey, chunks: dict[Span, bytes]) -> list[bytes]:
        """Forget chunks whose records are these, or any where one is empty; returns the records that are no more."""
        pairs = [part for span, record in chunks.items() for part in (encode_spans([span]), record)]
        where = (encode_name(key), self._options.log_length)
        texts: list[bytes] = self._run("DROP", "write", self.incarnation, *where, *pairs)
        return texts

    def announce(self, deleted: Deleted) -> None:
        self._run("ANNOUNCE", "write", self.incarnation, msgspec.msgpack.encode(deleted), self._options.log_length)

    def _follow(self, cursor: Cursor) -> Any:
        """The changes that Redis has after a cursor. A hub that is not among the live ones joins, under a new name."""
        asked = (cursor.life, cursor.seq, CHANGES_AT_ONCE, int(1000 * MEMBER_S), MAX_CHANGE_BYTES)
        answer = self._run("FOLLOW", "read", self.incarnation, 0, *asked, rests=False) if self.incarnation else None
        if answer is None or answer[0] == b"fenced":
            incarnation = secrets.token_hex(8)
            answer = self._run("FOLLOW", "read", incarnation, 1, *asked, rests=False)
            self.mine.add(incarnation)
            self.incarnation = incarnation
        self.seq, (self.hubs, self.nbytes) = answer[2], answer[3]
        return answer

    def _run(self, script: str, doing: Any, *arguments: Any, rests: bool = True) -> Any:
        def run(redis: Any) -> Any:
            if script not in self._scripts:
                self._scripts[script] = redis.register_script(scripts.COMMON + getattr(scripts, script))
            return self._scripts[script](keys=[self._prefix], args=arguments, client=redis)

        return self.link.do(doing, run, rests=rests)


def _run_of(name: bytes, answer: list[bytes]) -> StoredRun | None:
    """The run with its chunks; None unless the entry is as a hub writes it."""
    key = decode(name, RunKey)
    if key is None or len(answer) != 3:
        return None
    about, tokens, spans = answer
    chunks = tuple(sorted(span for span in decode_spans(spans) if 4 * span.end <= len(tokens)))
    return StoredRun(key, tokens, about, chunks) if chunks else None
