"""The tokens that one of BlendHub's forwards computes: spans of one prompt, or of several."""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.vllm.model.states.state_path import StatePath

Blocks = npt.NDArray[np.int64]


def pages_in(blocks: Blocks, n: int) -> Blocks:
    """The pages of these blocks, of which each has ``n``."""
    return (blocks[:, None] * n + np.arange(n)).ravel()


class RequestTokens(NamedTuple):
    """The tokens of one request that a forward computes."""

    tokens: Tokens
    tables: Sequence[Blocks]
    """The prompt's blocks in each of the model's block tables; in those of recurrent layers, the one with its state."""
    spans: Sequence[Span]
    """The spans of the prompt; disjoint."""
    path: StatePath | None = None
    """The way of its state, in models with recurrent layers."""


class RecomputeSet:
    """The tokens of all parts, in the order in which a forward takes them. Each span is a virtual request.

    Short spans come first, because some attention backends treat the first short ones as decodes. So a part's tokens
    stand in several places.
    """

    def __init__(self, parts: Sequence[RequestTokens]) -> None:
        spans = [span for part in parts for span in part.spans]
        lengths = np.array([span.end - span.start for span in spans], np.int64)
        order = np.argsort(lengths, kind="stable")
        self.parts = parts
        self.spans = [spans[number] for number in order.tolist()]
        self.owners = np.repeat(np.arange(len(parts)), [len(part.spans) for part in parts])[order]
        """For each span, the number of its part."""
        self.positions = positions_of(self.spans)
        """For each token, its position in its prompt."""
        self.token_owners = np.repeat(self.owners, lengths[order])
        """For each token, the number of its part."""

    def cut(self, length: int, most: int) -> tuple["RecomputeSet", "RecomputeSet"]:
        """The spans that are shorter, and the others, of which there are ``most`` at most."""
        n_long = min(most, sum(len(span) >= length for span in self.spans))
        at = len(self.spans) - n_long
        token = sum(len(span) for span in self.spans[:at])
        sets = []
        for spans, tokens in ((slice(at), slice(token)), (slice(at, None), slice(token, None))):
            some = copy(self)
            some.spans, some.owners = self.spans[spans], self.owners[spans]
            some.positions, some.token_owners = self.positions[tokens], self.token_owners[tokens]
            sets.append(some)
        return sets[0], sets[1]

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.positions)

    def places(self, part: int) -> npt.NDArray[np.int64]:
        """The places of a part's tokens."""
        return np.flatnonzero(self.token_owners == part)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The id of each token."""
        return self._ids(0)

    @property
    def ids_behind(self) -> npt.NDArray[np.int32]:
        """The id of the token behind each one; of the last known token its own."""
        return self._ids(1)

    def _ids(self, ahead: int) -> npt.NDArray[np.int32]:
        ids = np.empty(len(self), np.int32)
        for number, part in enumerate(self.parts):
            at = self.places(number)
            ids[at] = part.tokens[np.minimum(self.positions[at] + ahead, len(part.tokens) - 1)]
        return ids

    def table(self, n_blocks: int, table: int = 0) -> npt.NDArray[np.int32]:
        """The first blocks of each part in a block table, with zeros where it has fewer: a row for each."""
        rows = np.zeros((len(self.parts), n_blocks), np.int32)
        for row, part in zip(rows, self.parts, strict=True):
            blocks = part.tables[table][:n_blocks]
            row[: len(blocks)] = blocks
        return rows

    def slots(self, block_size: int, table: int = 0) -> npt.NDArray[np.int64]:
        """The slot of each token in the pages of a block table, as vLLM counts."""
        blocks = np.empty(len(self), np.int64)
        for number, part in enumerate(self.parts):
            at = self.places(number)
            blocks[at] = part.tables[table][self.positions[at] // block_size]
        return blocks * block_size + self.positions % block_size


def positions_of(spans: Sequence[Span]) -> npt.NDArray[np.int64]:
    starts = np.array([span.start for span in spans], np.int64)
    lengths = np.array([span.end for span in spans], np.int64) - starts
    firsts = np.cumsum(lengths) - lengths
    positions: npt.NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(starts - firsts, lengths)
    return positions
