"""The separator matcher: reuse of whole segments between separators, in any order.

Segments are looked up by their content in a dictionary, which compares the tokens themselves on a hit.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice

import numpy as np

from blendhub.contracts import Matcher
from blendhub.core.errors import OptionError
from blendhub.core.run_table import RunTable
from blendhub.core.spans import Match, Span, join
from blendhub.core.tokens import Tokens
from blendhub_matchers.options import SeparatorOptions

SEGMENT_BYTES = 450
MAX_COMPARED = 16
"""How many of a segment's owners are compared, the newest ones; one that is exact is preferred."""
OWNER_BYTES = 350
"""What CPython holds for a segment beyond its tokens, and for each of its owners, measured."""


class IndexedText:
    """The index entry of one run: its segments, ascending, and how far it is exact."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.contents: list[bytes] = []
        """The segments' tokens; the same objects as the keys of the index."""
        self.inexact_from: int | None = None


class SeparatorMatcher(Matcher):
    """Finds segments that are stored whole.

    Neighbours that stand side by side in one run as well become one match, with the separator between them. The last
    segment of a run is open: it is indexed as it stands, and again when the run grows.
    """

    reach = "segments"

    def __init__(self, options: SeparatorOptions) -> None:
        self._runs = RunTable()
        self._lock = threading.Lock()
        if isinstance(options.separator, str):
            raise OptionError(
                f"separator = {options.separator!r} is text, and only an engine has a tokenizer; write token ids here"
            )
        self._separator = np.array(options.separator, np.uint32)
        self._min = options.min_match_tokens
        self._texts: dict[int, IndexedText] = {}
        self._index: dict[bytes, dict[tuple[int, int], None]] = {}
        """For each content, its owners (run, start), the newest last."""
        self._index_bytes = 0

    @property
    def guaranteed_tokens(self) -> int:
        return self._min

    def add(self, run: int, tokens: Tokens, span: Span, exact: bool = True) -> None:
        with self._lock:
            self._runs.check_add(run, span)
            text = self._texts.setdefault(run, IndexedText())
            if not exact and text.inexact_from is None:
                text.inexact_from = span.start
            # The segment that was open until now, and even its end, may be another one with what follows.
            while text.spans and text.spans[-1].end > span.start - len(self._separator):
                self._drop(run, text, len(text.spans) - 1)
            indexed_until = text.spans[-1].end if text.spans else 0
            # A separator may begin in the span and end behind it.
            for segment in self._segments(tokens[: span.end + len(self._separator) - 1]):
                start, end = segment.start, min(segment.end, span.end)
                before = Span(start, max(start, min(end, span.start)))
                is_new = start >= indexed_until and end - start >= self._min
                if is_new and (not len(before) or self._runs.holds(run, before)):
                    self._learn(run, text, Span(start, end), tokens)
            self._runs.add(run, span)

    def discard(self, run: int, span: Span) -> None:
        with self._lock:
            self._runs.discard(run, span)
            text = self._texts[run]
            first = bisect_right(text.spans, span.start, key=lambda segment: segment.end)
            last = bisect_left(text.spans, span.end, key=lambda segment: segment.start)
            for at in range(last - 1, first - 1, -1):
                self._drop(run, text, at)
            if run not in self._runs:
                del self._texts[run]

    def match(self, tokens: Tokens) -> list[Match]:
        matches: list[Match] = []
        with self._lock:
            for segment in self._segments(tokens):
                owners = self._index.get(tokens[segment.start : segment.end].tobytes())
                if owners:
                    matches += self._reuse(segment, owners, matches[-1] if matches else None)
        return join(matches)

    def __len__(self) -> int:
        return self._runs.tokens

    @property
    def nbytes(self) -> int:
        return self._index_bytes

    def _reuse(self, segment: Span, owners: dict[tuple[int, int], None], before: Match | None) -> Iterator[Match]:
        """The match of one segment; with the separator before it where the match before goes on here."""
        width = len(self._separator)
        if before is not None and before.span.end + width == segment.start:
            source = before.source_start + len(before.span)
            if (before.run, source + width) in owners and self._runs.holds(before.run, Span(source, source + width)):
                joined = Span(before.span.end, segment.end)
                yield Match(joined, before.run, source, before.exact and self._is_exact(before.run, joined))
                return
        newest = islice(reversed(owners), MAX_COMPARED)
        run, source = min(newest, key=lambda owner: self._texts[owner[0]].inexact_from is not None)
        yield Match(segment, run, source, segment.start == source == 0 and self._is_exact(run, segment))

    def _is_exact(self, run: int, span: Span) -> bool:
        inexact_from = self._texts[run].inexact_from
        return inexact_from is None or span.end <= inexact_from

    def _segments(self, tokens: Tokens) -> Iterator[Span]:
        """The segments that are worth a match."""
        at = 0
        for start in self._separators(tokens):
            if start - at >= self._min:
                yield Span(at, start)
            at = start + len(self._separator)
        if tokens.size - at >= self._min:
            yield Span(at, tokens.size)

    def _separators(self, tokens: Tokens) -> Iterator[int]:
        """Where separators start, the leftmost first; one that overlaps the one before is none."""
        width = len(self._separator)
        if tokens.size < width:
            return
        places = np.flatnonzero(tokens[: tokens.size - width + 1] == self._separator[0])
        for offset in range(1, width):
            places = places[tokens[places + offset] == self._separator[offset]]
        free = 0
        for place in places.tolist():
            if place >= free:
                yield place
                free = place + width

    def _learn(self, run: int, text: IndexedText, segment: Span, sequence: Tokens) -> None:
        content = sequence[segment.start : segment.end].tobytes()
        if content not in self._index:
            self._index[content] = {}
            self._index_bytes += SEGMENT_BYTES + len(content)
        self._index[content][run, segment.start] = None
        self._index_bytes += OWNER_BYTES
        text.spans.append(segment)
        text.contents.append(content)

    def _drop(self, run: int, text: IndexedText, at: int) -> None:
        segment, content = text.spans.pop(at), text.contents.pop(at)
        owners = self._index[content]
        del owners[run, segment.start]
        self._index_bytes -= OWNER_BYTES
        if not owners:
            del self._index[content]
            self._index_bytes -= SEGMENT_BYTES + len(content)
