"""The contract of a matcher: which stored tokens does a prompt repeat, and where?"""

from abc import ABC, abstractmethod
from typing import Literal

from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens

Reach = Literal["prefix", "segments", "anywhere"]


class Matcher(ABC):
    """An index of the tokens whose KV is stored, in one namespace.

    Callers pass tokens as :func:`blendhub.core.tokens.as_tokens` makes them, spans that are not empty and end by the
    last token, and integers from 0 to 2**63 - 1 as ids of runs. No matcher checks these.

    *Runs.* A run is a token sequence whose KV was computed in one go. The caller chooses its id. A matcher holds a run
    while any token of the run is stored. When the last token is discarded, the caller may use the id again for another
    sequence.

    *Matches* are verified token by token: hashes may find candidates, they never decide. They are
    disjoint, ascending, not empty and name only tokens that are stored at the time of the call. Text
    that stands in the prompt several times is found each time. A match is marked exact only when the
    stored KV is bit for bit what the engine would compute: same tokens, same positions, same whole
    prefix, and stored as exact. Where a few runs hold the same stretch of a prompt, a match names one
    all of which was stored as exact, if there is such a run.

    *Threads.* All methods may be called from several threads at once; each call acts as a whole.

    *Errors.* A span that does not fit what is stored raises :class:`blendhub.core.errors.InvalidInput` and changes
    nothing.

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
    def add(self, run: int, tokens: Tokens, span: Span, exact: bool = True) -> None:
        """The KV of ``tokens[span]`` is now stored; it was computed with ``tokens[:span.start]`` before it.

        ``tokens`` is the whole sequence from position 0 and may go on after the span; the matcher keeps
        its own copy of what it needs. ``exact`` is false where part of the prefix was blended. A run grows
        at its end only: a later span starts where the last span ended, even if that span was discarded
        meanwhile.
        """

    @abstractmethod
    def discard(self, run: int, span: Span) -> None:
        """The KV of ``span`` of the run is gone; no later match names any token of it.

        The whole span must be stored. What is left of the run on both sides stays matchable.
        """

    @abstractmethod
    def match(self, tokens: Tokens) -> list[Match]:
        """The stored tokens that this prompt repeats, within the matcher's reach."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of stored tokens: all spans added, less all discarded."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory that the index holds, tokens included, in bytes."""
