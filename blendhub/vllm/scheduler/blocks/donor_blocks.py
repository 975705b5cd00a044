"""Donors that vLLM still has: the blocks of its prefix cache that hold KV which the hub has stored, too.

Their KV need not come from the arena. The hub names runs, and vLLM's cache finds blocks by their hashes; what connects
them is that this engine has stored a run, or loaded it exactly. A hash stands for a block's tokens and all before
them, the LoRA adapter and the salt, so what is found by it is exact.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from blendhub.contracts import PageSegment
from blendhub.core.spans import Match, Span, total
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks


class RunName(NamedTuple):
    epoch: int
    """The epoch of the hub that named the run."""
    run: int


class Copies(NamedTuple):
    """What a load copies from vLLM's own blocks."""

    segments: tuple[tuple[PageSegment, ...], ...]
    """For each block table."""
    blocks: list[KVCacheBlock]
    """All blocks that are read, each once."""
    n_tokens: int
    """The tokens that are copied; if block tables have different ones of them, the mean over the tables."""


class _Run(NamedTuple):
    first: int
    """The number of the first hash, counted from position 0."""
    hashes: list[BlockHash]


class DonorBlocks:
    """For the scheduler's thread. It remembers as many hashes as vLLM has blocks: more cannot be cached."""

    def __init__(self, engine: EngineBlocks) -> None:
        self._engine = engine
        self._runs: dict[RunName, _Run] = {}
        """The run used longest ago comes first."""
        self._n_hashes = 0

    def remember(self, name: RunName, span: Span, hashes: Sequence[BlockHash]) -> None:
        """Note that a run has the exact KV of ``span`` of a request with these own hashes."""
        size, known, left = self._engine.hash_block_size, self._forget(name), list[BlockHash]()
        first, end = span.start // size, span.end // size
        if known and known.first <= end:
            first, left = min(first, known.first), known.hashes[end - known.first :]
        run = _Run(first, [*hashes[first:end], *left])
        if run.hashes:
            self._runs[name] = run
            self._n_hashes += len(run.hashes)
        while self._n_hashes > self._engine.pool.num_gpu_blocks:
            self._forget(next(iter(self._runs)))

    def find(self, epoch: int, matches: Iterable[Match], usable: Callable[[KVCacheBlock], bool]) -> Copies:
        """What can be copied of these matches."""
        tables, used = self._engine.tables, dict[int, KVCacheBlock]()
        segments: list[list[PageSegment]] = [[] for _ in tables.block_sizes]
        for match in matches:
            name = RunName(epoch, match.run)
            if run := self._runs.pop(name, None):
                self._runs[name] = run
                for table, of_table in enumerate(segments):
                    blocks = {} if table in tables.of_states else self._blocks(table, run, match)
                    blocks = {number: block for number, block in blocks.items() if usable(block)}
                    used |= {block.block_id: block for block in blocks.values()}
                    of_table.extend(_segments(match, blocks, tables.block_sizes[table]))
        n_tokens = total(piece.span for of_table in segments for piece in of_table)
        n_tables = len(segments) - len(tables.of_states)
        return Copies(tuple(map(tuple, segments)), list(used.values()), n_tokens // n_tables)

    def clear(self) -> None:
        self._runs, self._n_hashes = {}, 0

    def _blocks(self, table: int, run: _Run, match: Match) -> dict[int, KVCacheBlock]:
        """The blocks with tokens of a match that vLLM's cache has for a table, by their numbers in the run."""
        size = self._engine.tables.block_sizes[table]
        hashes_a_block = size // self._engine.hash_block_size
        blocks = {}
        for number in range(match.source_start // size, -(-(match.source_start + len(match.span)) // size)):
            at = (number + 1) * hashes_a_block - 1 - run.first
            if 0 <= at < len(run.hashes) and (block := self._engine.cached_block(table, run.hashes[at])):
                blocks[number] = block
        return blocks

    def _forget(self, name: RunName) -> _Run | None:
        run = self._runs.pop(name, None)
        self._n_hashes -= len(run.hashes) if run else 0
        return run


def _segments(match: Match, blocks: dict[int, KVCacheBlock], size: int) -> Iterator[PageSegment]:
    """The parts of a match that these blocks hold: one for each row of blocks, which are in order."""
    start, end = match.source_start, match.source_start + len(match.span)
    for _, neighbours in groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in neighbours]
        first, last = max(start, numbers[0] * size), min(end, (numbers[-1] + 1) * size)
        span = Span(match.span.start + first - start, match.span.start + last - start)
        ids = np.array([blocks[number].block_id for number in numbers], np.int64)
        yield PageSegment(span, ids, first - numbers[0] * size, first)
