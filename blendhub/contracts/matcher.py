"""The contract of a matcher: which stored tokens does a prompt repeat, and where?"""

import threading
from abc import ABC, abstractmethod
from typing import Literal

from blendhub.contracts.plugin_errors import Guarded
from blendhub.core.errors import InvalidInput
from blendhub.core.run_table import RunTable
from blendhub.core.spans import MOST_GENERATION, Match, Span
from blendhub.core.tokens import TokenBuffer, Tokens, as_tokens

Reach = Literal["prefix", "segments", "anywhere"]


class Matcher(Guarded, ABC):
    """An index of the tokens whose KV is stored, in one namespace.

    Callers use ``add``, ``discard`` and ``match``, which check their arguments. A plugin implements ``insert``,
    ``remove`` and ``find``, whose arguments are sound by themselves: tokens are arrays of uint32, spans are not empty
    and end within the tokens, a run's id is an integer. Whether they fit what is stored is the plugin's to check.

    *Runs.* A run is a token sequence whose KV was computed in one go. Its id is an integer from 0 to
    2**63 - 1 that the caller chooses. A run is known while any token of it is stored; when the last one
    is discarded, the id may be used again for another sequence.

    *Matches* are verified token by token: hashes may find candidates, they never decide. They are
    disjoint, ascending, not empty and name only tokens that are stored at the time of the call. Text
    that stands in the prompt several times is found each time. A match is marked exact only when the
    stored KV is bit for bit what the engine would compute: same tokens, same positions, same whole
    prefix, and stored as exact.

    *Generations* say how far stored KV is from exact KV, which has generation 0; that of a run is the highest that it
    was added with. Where a few runs hold the same stretch of a prompt, a match names one of the lowest generation.

    *Threads.* All methods may be called from several threads at once; each call acts as a whole.

    *Errors.* Bad input raises :class:`blendhub.core.errors.InvalidInput` and changes nothing.

    *Memory.* The index grows as needed. What is discarded is reclaimed: storing and discarding without end
    holds no more memory than the largest amount stored at a time.

    *Determinism.* The same calls give the same matches, whatever the secret and ``PYTHONHASHSEED``.
    """

    reach: Reach
    """What the matcher promises to find.

    ``prefix``: the longest stored prefix of the prompt, token by token. ``segments``: whole segments
    between separators, wherever they stand. ``anywhere``: every stretch of at least
    :attr:`guaranteed_tokens` stored tokens, at any offset, without separators.
    """

    @property
    @abstractmethod
    def guaranteed_tokens(self) -> int:
        """The length from which reuse within reach is certain to be found; shorter reuse may be."""

    @abstractmethod
    def insert(self, run: int, tokens: Tokens, span: Span, generation: int) -> None:
        """The KV of ``tokens[span]`` is now stored; it was computed with ``tokens[:span.start]`` before it.

        ``tokens`` is the whole sequence from position 0 and may go on after the span; the matcher keeps
        its own copy of what it needs. A ``generation`` above 0 says that part of the prefix was blended. A known
        run grows at its end only: the span of a later call starts where the last one ended, even if that
        one was discarded meanwhile. Any other span is refused.
        """

    @abstractmethod
    def remove(self, run: int, span: Span) -> None:
        """The KV of ``span`` of the run is gone; no later match names any token of it.

        The whole span must be stored. What is left of the run on both sides stays matchable.
        """

    @abstractmethod
    def find(self, tokens: Tokens) -> list[Match]:
        """The stored tokens that this prompt repeats, within the matcher's reach."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of stored tokens: all spans added, less all discarded."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory that the index holds, tokens included, in bytes."""

    def add(self, run: int, tokens: TokenBuffer, span: Span, generation: int = 0) -> None:
        """``insert``, with tokens in any buffer. An empty span is refused, and so is one that ends after the tokens."""
        sequence = as_tokens(tokens)
        _check_run(run)
        if not 0 <= generation <= MOST_GENERATION:
            raise InvalidInput(f"a generation is a number from 0 to {MOST_GENERATION}, got {generation}")
        if not len(span) or span.end > sequence.size:
            raise InvalidInput(
                f"add needs a span that is not empty and ends by the last of {sequence.size} tokens, got {span}"
            )
        self.insert(run, sequence, span, generation)

    def discard(self, run: int, span: Span) -> None:
        """``remove``. An empty span is refused."""
        _check_run(run)
        if not len(span):
            raise InvalidInput(f"discard needs a span that is not empty, got {span} of run {run}")
        self.remove(run, span)

    def match(self, tokens: TokenBuffer) -> list[Match]:
        """``find``, with tokens in any buffer."""
        return self.find(as_tokens(tokens))


class TrackedMatcher(Matcher):
    """A matcher that keeps its runs in a :class:`RunTable` and takes one call at a time.

    A plugin implements ``index``, ``forget`` and ``search``, which are called with the lock held and with arguments
    that fit what is stored. The table learns of a span after ``index``, so an error raised there leaves it as it was.
    It has dropped a span before ``forget``.
    """

    def __init__(self) -> None:
        self.runs = RunTable()
        self._lock = threading.Lock()

    @abstractmethod
    def index(self, run: int, tokens: Tokens, span: Span, generation: int) -> None:
        """``insert``, of a span that is new or continues its run."""

    @abstractmethod
    def forget(self, run: int, span: Span) -> None:
        """``remove``, of a span that was stored whole."""

    @abstractmethod
    def search(self, tokens: Tokens) -> list[Match]:
        """``find``."""

    def insert(self, run: int, tokens: Tokens, span: Span, generation: int) -> None:
        with self._lock:
            self.runs.check_add(run, span)
            self.index(run, tokens, span, generation)
            self.runs.add(run, span)

    def remove(self, run: int, span: Span) -> None:
        with self._lock:
            self.runs.discard(run, span)
            self.forget(run, span)

    def find(self, tokens: Tokens) -> list[Match]:
        with self._lock:
            return self.search(tokens)

    def __len__(self) -> int:
        return self.runs.tokens


def _check_run(run: object) -> None:
    if type(run) is not int or not 0 <= run < 2**63:
        raise InvalidInput(f"a run is named by an integer from 0 to 2**63 - 1, not by {run!r}")
