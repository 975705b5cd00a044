"""A matcher in one file: reuse at any offset, found by looking up windows of the prompt in a dictionary.

Each run is cut in windows; the dictionary knows where each window's tokens are stored. A match looks up
every position of the prompt, and follows what it finds in both directions, token by token.
"""

import threading
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub import Match, PluginSpec, Span, hookimpl
from blendhub.contracts import Matcher
from blendhub.core.run_table import RunTable
from blendhub.core.tokens import Tokens

BYTES_PER_WINDOW = 400
"""What a window costs beside its tokens: two dictionary entries, a bytes object, a tuple, an inner dictionary."""


class NgramOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    window_tokens: Annotated[
        int, msgspec.Meta(ge=1, le=4096, description="tokens looked up at once; smaller finds more and holds more")
    ] = 32


class StoredTokens:
    """A run: its sequence from position 0, and for each position whether it is stored, and as exact."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.tokens: Tokens = np.empty(0, np.uint32)
        self.stored: npt.NDArray[np.bool_] = np.empty(0, bool)
        self.exact: npt.NDArray[np.bool_] = np.empty(0, bool)
        self.approximate = False
        """Whether anything was added that is not exact."""

    def __len__(self) -> int:
        return len(self.tokens)

    def grow(self, tokens: Tokens, span: Span, exact: bool) -> None:
        new = np.arange(len(self), span.end) >= span.start
        self.tokens = np.concatenate([self.tokens, tokens[len(self) : span.end]])
        self.stored = np.concatenate([self.stored, new])
        self.exact = np.concatenate([self.exact, new & exact])
        self.approximate |= not exact


class NgramMatcher(Matcher):
    reach = "anywhere"

    def __init__(self, options: NgramOptions) -> None:
        self._lock = threading.Lock()
        self._runs = RunTable()
        self._window = options.window_tokens
        self._texts: dict[int, StoredTokens] = {}
        self._places: dict[bytes, dict[tuple[int, int], None]] = {}
        self._n_windows = 0
        self._n_kept = 0

    @property
    def guaranteed_tokens(self) -> int:
        # Wherever a stretch of this length begins, it holds one whole window of its run.
        return 2 * self._window - 1

    def add(self, run: int, tokens: Tokens, span: Span, exact: bool = True) -> None:
        with self._lock:
            self._runs.check_add(run, span)
            entry = self._texts.setdefault(run, StoredTokens(span.start))
            before = len(entry)
            entry.grow(tokens, span, exact)
            self._n_kept += len(entry) - before
            # The window that this span completes may have begun before it.
            for text, place in self._windows(run, Span(max(entry.start, span.start - self._window + 1), span.end)):
                self._places.setdefault(text, {})[place] = None
                self._n_windows += 1
            self._runs.add(run, span)

    def discard(self, run: int, span: Span) -> None:
        with self._lock:
            self._runs.discard(run, span)
            entry = self._texts[run]
            entry.stored[span.start : span.end] = False
            if run in self._runs:
                return
            for text, place in self._windows(run, Span(entry.start, len(entry))):
                del self._places[text][place]
                self._n_windows -= 1
                if not self._places[text]:
                    del self._places[text]
            self._n_kept -= len(entry)
            del self._texts[run]

    def match(self, tokens: Tokens) -> list[Match]:
        text = tokens.tobytes()
        matches: list[Match] = []
        at = covered = 0
        with self._lock:
            while at + self._window <= len(tokens):
                places = self._places.get(text[4 * at : 4 * (at + self._window)], {})
                whole = [place for place in places if self._texts[place[0]].stored[place[1] :][: self._window].all()]
                if whole:
                    stretches = (self._stretch(run, source, tokens, at, covered) for run, source in whole)
                    matches.append(max(stretches, key=self._rank))
                    at = covered = matches[-1].span.end
                else:
                    at += 1
        return matches

    def __len__(self) -> int:
        return self._runs.tokens

    @property
    def nbytes(self) -> int:
        return 6 * self._n_kept + self._n_windows * (BYTES_PER_WINDOW + 4 * self._window)

    def _rank(self, match: Match) -> tuple[int, bool]:
        """The longest match is the best one, and of those that are as long, one of an exact run."""
        return len(match.span), not self._texts[match.run].approximate

    def _windows(self, run: int, span: Span) -> list[tuple[bytes, tuple[int, int]]]:
        """The windows of the run that lie whole in ``span``: their text and their place."""
        entry, width = self._texts[run], self._window
        first = entry.start + -(-(span.start - entry.start) // width) * width
        return [
            (entry.tokens[start : start + width].tobytes(), (run, start))
            for start in range(first, span.end - width + 1, width)
        ]

    def _stretch(self, run: int, source: int, prompt: Tokens, at: int, covered: int) -> Match:
        """The longest stretch through a window that agrees, back to what is covered and on to a difference."""
        entry = self._texts[run]
        back = min(source, at - covered)
        ahead = min(len(entry) - source, len(prompt) - at)
        theirs = slice(source - back, source + ahead)
        agrees = (entry.tokens[theirs] == prompt[at - back : at + ahead]) & entry.stored[theirs]
        differs = np.flatnonzero(~agrees)
        left, right = differs[differs < back], differs[differs > back]
        first = int(left[-1]) + 1 if len(left) else 0
        last = int(right[0]) if len(right) else len(agrees)
        span = Span(at - back + first, at - back + last)
        start = source - back + first
        return Match(span, run, start, start == span.start and _is_exact(entry, span, prompt))


def _is_exact(entry: StoredTokens, span: Span, prompt: Tokens) -> bool:
    same_prefix = np.array_equal(entry.tokens[: span.end], prompt[: span.end])
    return same_prefix and bool(entry.exact[span.start : span.end].all())


@hookimpl
def blendhub_matchers() -> list[PluginSpec[Matcher]]:
    return [
        PluginSpec(
            name="ngram",
            api=1,
            summary="reuse at any offset, with a dictionary and no compiled code",
            factory=NgramMatcher,
            options=NgramOptions,
        )
    ]
