"""Scratch: blocks that vLLM's pool lends while a prompt is blended, for the tokens that have left a window.

vLLM keeps the blocks of a layer with an attention window for the last window only. Tokens that are recomputed in the
middle of a prompt attend to keys before that. So the prompt is loaded and recomputed with more blocks than vLLM has
allocated: free ones of the pool, which it gets back after that, and those of its prefix cache that end where the load
begins. Nothing is reserved, so the KV capacity is what it is without BlendHub.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from blendhub.vllm.messages import NULL_BLOCK
from blendhub.vllm.scheduler.blocks.block_tables import MOST_BORROWED, BlockTables, Window
from blendhub.vllm.scheduler.blocks.request_blocks import RequestBlocks, Tables
from blendhub.vllm.scheduler.request_state import RequestState

LEAST_FREE = 0.25
"""With a smaller share of free blocks, vLLM gets them back although blended KV is not stored yet."""
MOST_LOANS = 8
"""How often blocks are borrowed for a request for which vLLM then does not find its own."""


class MissingBlocks(NamedTuple):
    """The blocks of one table that vLLM does not keep for a request, and that recomputed tokens attend to."""

    cached: range
    """The numbers of those before the load, which vLLM's prefix cache has."""
    loaded: range
    """The numbers of those of the load."""


def missing_blocks(size: int, window: Window | None, start: int, end: int) -> MissingBlocks:
    """What a table lacks of the tokens that the tokens ``[start, end)`` attend to. ``start`` begins a block."""
    if window is None:
        return MissingBlocks(range(0), range(0))
    # vLLM drops the blocks whose tokens the token at ``end`` does not attend to.
    n_dropped, first = window.begin(end) // size, window.begin(start) // size
    border = min(start // size, n_dropped)
    return MissingBlocks(range(min(first, border), border), range(border, n_dropped))


class Loan(NamedTuple):
    """The blocks that are held for a request."""

    borrowed: list[KVCacheBlock]
    """Blocks that hold what this request loads and computes."""
    pinned: list[KVCacheBlock]
    """Blocks of vLLM's prefix cache that the request reads."""
    numbers: list[dict[int, int]]
    """For each block table, the blocks by their places in it."""


class Scratch:
    """All methods are called by the scheduler's thread, between vLLM's own calls."""

    def __init__(self, blocks: RequestBlocks, tables: BlockTables, patience_s: float) -> None:
        """``patience_s``: how long blended KV may stay in borrowed blocks after its load, until the hub has slots."""
        self.blocks = blocks
        self.tables = tables
        self._patience_s = patience_s
        self._asked: dict[str, Loan] = {}
        """The loans of requests for which vLLM has not allocated blocks yet in this step."""
        self._held: dict[str, Loan] = {}
        self._wanted: set[str] = set()
        """The requests whose blocks this step wants to be held."""
        self._kept_until: dict[str, float] = {}
        """Until when blocks may be held of requests that are loaded, or repaired."""
        self._n_failed: dict[str, int] = {}
        """How often vLLM has found no blocks beside those that were borrowed, by request."""

    @property
    def n_borrowed(self) -> int:
        return sum(len(loan.borrowed) for loan in [*self._asked.values(), *self._held.values()])

    def borrow(self, state: RequestState) -> bool | None:
        """Borrow what the request's decision needs; False: there is too little, None: there may be more in a step.

        Called with each decision, before vLLM allocates blocks for it.
        """
        self._give_back(self._asked, state.id)
        decision, request = state.decision, state.request
        if not decision or not decision.recomputes:
            return True
        tables = zip(self.tables.block_sizes, self.tables.windows, strict=True)
        missing = [missing_blocks(size, window, decision.start, decision.end) for size, window in tables]
        n_lost = sum(len(of_table.loaded) for of_table in missing)
        if not any(of_table.cached or of_table.loaded for of_table in missing):
            return True
        pool = self.blocks.pool
        if self._n_failed.get(state.id, 0) >= MOST_LOANS:
            return False
        most = int(MOST_BORROWED * pool.num_gpu_blocks)
        hit: Sequence[Sequence[KVCacheBlock]] = [()] * len(missing)
        if decision.start:
            hit = self.blocks.cached_blocks(request.block_hashes, request.num_tokens - 1)
        cached = [
            {at: blocks[at] for at in of_table.cached if at < len(blocks) and not blocks[at].is_null}
            for blocks, of_table in zip(hit, missing, strict=True)
        ]
        if n_lost > most or any(len(of_table.cached) > len(cached[table]) for table, of_table in enumerate(missing)):
            return False
        # vLLM will take what it has found, and takes notice only then that it is in use.
        pinned = [block for of_table in hit for block in of_table if not block.is_null]
        n_free = pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in pinned)
        if n_lost + self.n_borrowed > most or n_lost + self._needed(decision.start, request.num_tokens) > n_free:
            # What is held for a repair may be held as long as its answer takes.
            return None if self._held.keys() - self._kept_until.keys() else False
        pool.touch(pinned)
        borrowed = pool.get_new_blocks(n_lost)
        left = iter(borrowed)
        numbers = [{at: next(left).block_id for at in of_table.loaded} for of_table in missing]
        for of_table, places in zip(cached, numbers, strict=True):
            places |= {at: block.block_id for at, block in of_table.items()}
        self._asked[state.id] = Loan(borrowed, pinned, numbers)
        return True

    def allocated(self, request: str) -> None:
        """vLLM has allocated blocks for a request that will be loaded."""
        if loan := self._asked.pop(request, None):
            self.give_back(request)  # with the time of an earlier load, which must not end this one
            self._held[request] = loan

    def complete(self, request: str, tables: Tables) -> Tables:
        """A request's tables, with what is borrowed for it where vLLM has dropped blocks."""
        loan = self._held.get(request)
        if loan is None:
            return tables
        return [
            [numbers.get(at, NULL_BLOCK) if block == NULL_BLOCK else block for at, block in enumerate(blocks)]
            for blocks, numbers in zip(tables, loan.numbers, strict=True)
        ]

    def loaded(self, request: str) -> None:
        """A request is loaded; its blended KV may still be stored from the blocks, for a while."""
        if request in self._held:
            self._kept_until[request] = time.monotonic() + self._patience_s

    def hold(self, request: str, tables: Tables) -> None:
        """Hold the blocks that will leave a window, for this step; called in each one, with what vLLM has not freed."""
        self._wanted.add(request)
        self._kept_until[request] = time.monotonic() + self._patience_s
        loan = self._held.setdefault(request, Loan([], [], [{} for _ in tables]))
        for numbers, table, window in zip(loan.numbers, tables, self.tables.windows, strict=True):
            if window:
                first = max(numbers, default=-1) + 1
                new = {at: number for at, number in enumerate(table[first:], first) if number != NULL_BLOCK}
                blocks = [self.blocks.pool.blocks[number] for number in new.values()]
                self.blocks.pool.touch(blocks)
                loan.pinned.extend(blocks)
                numbers |= new

    def end_step(self, are_needed: Callable[[str], bool]) -> None:
        """vLLM has planned a step, and this says which requests that are loaded have something to store.

        Given back are their other blocks, and those of requests for which vLLM has not allocated its own.
        """
        for request in list(self._asked):
            self._n_failed[request] = self._n_failed.get(request, 0) + 1
            self._give_back(self._asked, request)
        for request, until in list(self._kept_until.items()):
            is_needed = are_needed(request) and time.monotonic() <= until
            if self.is_short or not (is_needed or request in self._wanted):
                self.give_back(request)
        self._wanted.clear()

    def give_back(self, request: str) -> None:
        """Give back the blocks of a request: no step that is still to be planned will use them."""
        self._kept_until.pop(request, None)
        self._give_back(self._held, request)

    def ended(self, request: str) -> None:
        """A request has ended, which will not be asked for again."""
        self._give_back(self._asked, request)
        self._n_failed.pop(request, None)

    @property
    def is_short(self) -> bool:
        """Whether vLLM may need the blocks for the requests that it has."""
        pool = self.blocks.pool
        return pool.get_num_free_blocks() < LEAST_FREE * pool.num_gpu_blocks

    def has_room(self, n_tokens: int) -> bool:
        """Whether there are free blocks for a request of ``n_tokens``."""
        return self._needed(0, n_tokens) <= self.blocks.pool.get_num_free_blocks()

    def _needed(self, start: int, n_tokens: int) -> int:
        """About how many blocks vLLM allocates for a request of ``n_tokens``, if it has those before ``start``."""
        return sum(
            min(-(-n_tokens // size) - start // size, -(-window.size // size) + 1 if window else n_tokens)
            for size, window in zip(self.tables.block_sizes, self.tables.windows, strict=True)
        )

    def _give_back(self, loans: dict[str, Loan], request: str) -> None:
        if loan := loans.pop(request, None):
            self.blocks.pool.free_blocks([*loan.borrowed, *loan.pinned])
