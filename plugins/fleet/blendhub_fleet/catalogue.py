"""The catalogue: runs and their chunks in Redis, and the log of what changed."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from blendhub.contracts import RunKey, StoredRun
from blendhub.errors import CursorLost, StoreFailed
from blendhub.plan import Span
from blendhub_fleet import scripts
from blendhub_fleet.link import BLOCK_S, Link
from blendhub_fleet.options import FleetOptions
from blendhub_fleet.records import decode_name, decode_spans, encode_name, encode_spans

MEMBER_S = 15.0
"""A hub that is silent for so long counts as dead."""
CHANGES_AT_ONCE = 64
RUNS_AT_ONCE = 8
"""Few: the hub's loop has Python's lock while the next ones are on their way."""
SCAN_COUNT = 1000


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """A place in the log."""

    life: str
    """Of Redis: another one since it was started again, or emptied, for it may have forgotten changes then."""
    seq: int


class Entry(NamedTuple):
    """One change of the log."""

    writer: str
    published: bool
    name: bytes
    spans: tuple[Span, ...]


class Catalogue:
    """Called from several threads at once; ``begin``, ``entries`` and ``wait`` from one."""

    def __init__(self, options: FleetOptions) -> None:
        self.link = Link(options.catalogue, options.deadline_s)
        self.incarnation = ""
        """The name of this hub among the others, since it joined; a new one each time."""
        self.mine: set[str] = set()
        self.hubs = self.nbytes = self.seq = self.behind = 0
        """What Redis said last: the hubs that live, the bytes that are catalogued, and the last change."""
        self._prefix = f"blendhub:{{{options.group}}}:"
        self._options = options
        self._scripts: dict[str, Any] = {}

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
        for id, fields in answer[4]:
            reached += 1
            if id != b"%d-0" % reached:
                raise CursorLost(f"change {reached} is missing in the log of {self.link.place}")
            entry = dict(zip(fields[::2], fields[1::2], strict=True))
            spans = tuple(decode_spans(entry[b"s"]))
            entries.append(Entry(entry[b"w"].decode(errors="replace"), entry[b"k"] == b"p", entry[b"r"], spans))
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
        position = 0
        while True:
            position, found = self.link.do(
                "read", lambda redis, at=position: redis.zscan(self._prefix + "runs", at, count=SCAN_COUNT)
            )
            yield from (name for name, _ in found)
            if not position:
                return

    def runs(self, names: Iterable[bytes]) -> Iterator[tuple[bytes, StoredRun]]:
        """The runs of these names that are catalogued, with all their chunks."""
        names = iter(names)
        while some := list(islice(names, RUNS_AT_ONCE)):
            answers = iter(self.link.do("read", lambda redis, some=some: self._ask_for_runs(redis, some)))
            for name, fields, about, tokens in zip(some, answers, answers, answers, strict=False):
                spans = sorted(span for field in fields if len(field) == 8 for span in decode_spans(field))
                chunks = tuple(span for span in spans if tokens and 4 * span.end <= len(tokens))
                key = decode_name(name)
                if key and chunks and about is not None:
                    yield name, StoredRun(key, tokens, about, chunks)

    def _ask_for_runs(self, redis: Any, names: Sequence[bytes]) -> Any:
        asking = redis.pipeline(transaction=False)
        for name in names:
            asking.hkeys(self._key("run:", name))
            asking.hget(self._key("run:", name), "a")
            asking.get(self._key("tok:", name))
        return asking.execute()

    def records(self, wanted: Sequence[tuple[RunKey, Span]]) -> list[bytes | None]:
        """The records of chunks; None for those that are not catalogued. This is a use of their runs."""
        names = [encode_name(key) for key, _ in wanted]

        def ask(redis: Any) -> Any:
            asking = redis.pipeline(transaction=False)
            for name, (_, span) in zip(names, wanted, strict=True):
                asking.hget(self._key("run:", name), encode_spans([span]))
            asking.zadd(self._prefix + "runs", dict.fromkeys(names, self.seq), xx=True, gt=True)
            # The last answer is that of the use, which a full Redis refuses: that costs the order of use alone.
            return asking.execute(raise_on_error=False)[:-1]

        found: list[bytes | None] = self.link.do("read", ask)
        for answer in found:
            if isinstance(answer, Exception):
                raise StoreFailed(f"{self.link.place} failed to read: {answer}") from answer
        return found

    def publish(self, incarnation: str, run: StoredRun | None, key: RunKey, chunks: dict[Span, bytes]) -> list[bytes]:
        """Catalogue chunks with their records, and the run's tokens if given; returns the records that are no more.

        Raises InvalidInput if the run is not catalogued, and not given. ``incarnation`` is that of when the bytes began
        to move.
        """
        pairs = [part for span, record in chunks.items() for part in (encode_spans([span]), record)]
        tokens, about = (run.tokens, run.description) if run else (b"", b"")
        limits = (int(self._options.capacity_gib * 2**30), self._options.log_length)
        spans = encode_spans(sorted(chunks))
        found: list[bytes] = self._run(
            "PUBLISH", "write", incarnation, encode_name(key), tokens, about, *limits, spans, *pairs
        )
        return found

    def drop(self, key: RunKey, chunks: dict[Span, bytes]) -> list[bytes]:
        """Forget chunks whose records are these, or any where one is empty; returns the records that are no more."""
        pairs = [part for span, record in chunks.items() for part in (encode_spans([span]), record)]
        found: list[bytes] = self._run(
            "DROP", "write", self.incarnation, encode_name(key), self._options.log_length, *pairs
        )
        return found

    def _follow(self, cursor: Cursor) -> Any:
        """What Redis has after a cursor. A hub that is not among those that live joins them, under a new name."""
        known = (cursor.life, cursor.seq, CHANGES_AT_ONCE, int(1000 * MEMBER_S))
        answer = self._run("FOLLOW", "read", self.incarnation, 0, *known, rests=False) if self.incarnation else None
        if answer is None or answer[0] == b"fenced":
            incarnation = secrets.token_hex(8)
            answer = self._run("FOLLOW", "read", incarnation, 1, *known, rests=False)
            self.mine.add(incarnation)
            self.incarnation = incarnation
        self.seq, (self.hubs, self.nbytes) = answer[2], answer[3]
        return answer

    def _run(self, script: str, doing: Any, *given: Any, rests: bool = True) -> Any:
        def run(redis: Any) -> Any:
            if script not in self._scripts:
                self._scripts[script] = redis.register_script(getattr(scripts, script))
            return self._scripts[script](keys=[self._prefix], args=given, client=redis)

        return self.link.do(doing, run, rests=rests)

    def _key(self, kind: str, name: bytes) -> bytes:
        return f"{self._prefix}{kind}".encode() + name
