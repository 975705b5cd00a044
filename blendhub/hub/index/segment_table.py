"""The texts of segments, and where a prompt has one of them whole.

A matcher names one run for each stretch of a prompt. Of segments that overlap, that may be one that the prompt has in
part only, so they are looked for one by one here.
"""

import secrets
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens

Hashes = npt.NDArray[np.uint64]
COMPARISON = 256
"""The tokens that are compared in about the time that it takes to begin a comparison."""
MOST_COMPARED = 16
"""How often, at most, the tokens of a prompt are compared: some texts are at nearly each place of some prompts."""


class Text(NamedTuple):
    """A segment's tokens, and the position of the first one in the run."""

    run: int
    start: int
    tokens: Tokens


class SegmentTable:
    """Texts by the hash of their beginnings, which are as long as the largest power of two within a text's length.

    Methods are parts of a queue's work.
    """

    def __init__(self) -> None:
        self._factor = 2 * secrets.randbits(63) + 1
        self._by_run: dict[int, Text] = {}
        self._by_width: dict[int, dict[int, list[Text]]] = {}

    @property
    def runs(self) -> set[int]:
        return {*self._by_run}

    @property
    def nbytes(self) -> int:
        return sum(text.tokens.nbytes for text in self._by_run.values())

    def add(self, run: int, span: Span, tokens: Tokens) -> None:
        """The segment of a run is complete; ``tokens`` are those of the run from position 0."""
        text = Text(run, span.start, tokens[span.start : span.end].copy())
        width = _width_of(text)
        self._by_run[run] = text
        self._by_width.setdefault(width, {}).setdefault(self._beginning_of(text), []).append(text)

    def discard(self, run: int) -> None:
        if text := self._by_run.pop(run, None):
            beginnings, beginning = self._by_width[_width_of(text)], self._beginning_of(text)
            beginnings[beginning].remove(text)
            if not beginnings[beginning]:
                del beginnings[beginning]

    def match(self, prompt: Tokens) -> list[Match]:
        """Each place where the prompt has a segment whole, verified token by token. Places overlap if those of several
        segments do. A prompt that repeats some tokens very often may have more.
        """
        found: list[Match] = []
        left, ends = MOST_COMPARED * (len(prompt) + 16 * COMPARISON), dict[int, int]()
        windows = _Windows(prompt, self._factor) if self._by_run else None
        for width, beginnings in self._by_width.items():
            if not windows or not beginnings or width > len(prompt):
                continue
            for at, value in _places_of(windows.hashes(width), beginnings):
                for run, start, tokens in beginnings.get(value, ()):
                    end = at + len(tokens)
                    is_possible = end <= len(prompt) and at >= ends.get(run, 0)
                    left -= COMPARISON + is_possible * len(tokens)
                    if left < 0:
                        return found
                    if is_possible and np.array_equal(prompt[at:end], tokens):
                        found.append(Match(Span(at, end), run, start, False))
                        ends[run] = end
        return found

    def _beginning_of(self, text: Text) -> int:
        width = _width_of(text)
        return int(_Windows(text.tokens[:width], self._factor).hashes(width)[0])


class _Windows:
    """Hashes of all windows of some tokens: polynomials of a factor, modulo 2**64."""

    def __init__(self, tokens: Tokens, factor: int) -> None:
        self._sums = np.zeros(len(tokens) + 1, np.uint64)
        # A token counts one more, so that leading zeros do.
        np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _powers(factor, len(tokens)), out=self._sums[1:])
        self._shifts = _powers(pow(factor, -1, 2**64), len(tokens))

    def hashes(self, width: int) -> Hashes:
        return (self._sums[width:] - self._sums[:-width]) * self._shifts[: len(self._sums) - width]


def _width_of(text: Text) -> int:
    return 1 << (len(text.tokens).bit_length() - 1)


def _powers(factor: int, n: int) -> Hashes:
    powers = np.full(n, factor, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _places_of(hashes: Hashes, beginnings: dict[int, list[Text]]) -> Iterator[tuple[int, int]]:
    """The places, and the hashes there, that may be those of beginnings: the first 16 bits are looked up together."""
    first_bits, is_known = np.uint64(48), np.zeros(2**16, bool)
    is_known[np.fromiter(beginnings, np.uint64, len(beginnings)) >> first_bits] = True
    places = np.flatnonzero(is_known[hashes >> first_bits])
    return zip(places.tolist(), hashes[places].tolist(), strict=True)
