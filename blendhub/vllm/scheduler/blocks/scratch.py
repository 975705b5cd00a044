"""Scratch: blocks that vLLM's pool lends while a prompt is blended, for the tokens that have left a window.

vLLM keeps the blocks of a layer with an attention window for the last window only. Tokens that are recomputed in the
middle of a prompt attend to keys before that. So the prompt is loaded and recomputed with more blocks than vLLM has
allocated: free ones of the pool, which it gets back after that, and those of its prefix cache that end where the load
begins. Nothing is reserved, so the KV capacity is what it is without BlendHub.
"""

import math
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import NULL_BLOCK
from blendhub.vllm.scheduler.blocks.block_tables import MAX_BORROWED, Window
from blendhub.vllm.scheduler.blocks.donor_blocks import Copies, DonorBlocks
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.blocks.exact_states import ExactStates
from blendhub.vllm.scheduler.request.blocks import Loan, RequestBlocks, Tables
from blendhub.vllm.scheduler.request.served_request import Requests, ServedRequest

LEAST_FREE = 0.25
"""With a smaller share of free blocks, vLLM gets them back although blended KV is not stored yet."""
MAX_LOANS = 8
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


class Borrowed(Enum):
    """The answer to a request that blends."""

    YES = auto()
    """What it needs is lent, or it needs nothing."""
    LATER = auto()
    """Others will give blocks back within a few steps."""
    NO = auto()


class Scratch:
    """All methods are called by the scheduler's thread, between vLLM's own calls."""

    def __init__(self, blocks: EngineBlocks, requests: Requests, patience_s: float) -> None:
        """``patience_s``: how long blended KV may stay in borrowed blocks after its load, until the hub has slots."""
        self.blocks = blocks
        self.tables = blocks.tables
        self._requests = requests
        self._patience_s = patience_s
        self.n_borrowed = 0
        self.states = ExactStates(blocks)
        self.donors = DonorBlocks(blocks)

    def borrow(self, request: ServedRequest) -> Borrowed:
        """Borrow what the request's decision needs. Called with each decision, before vLLM allocates blocks for it."""
        own, decision, engine_request = request.blocks, request.reuse.decision, request.request
        self._give_back_asked(own)
        if not decision or not decision.recomputes:
            return Borrowed.YES
        states = self._states_before(request, decision)
        if states is None:
            return Borrowed.NO
        tables = zip(self.tables.block_sizes, self.tables.windows, strict=True)
        missing = [missing_blocks(size, window, decision.start, decision.end) for size, window in tables]
        n_lost = sum(len(of_table.loaded) for of_table in missing)
        pool = self.blocks.pool
        if not any(of_table.cached or of_table.loaded for of_table in missing):
            if any(states):
                pinned = [pool.blocks[number] for places in states for number in places.values()]
                pool.touch(pinned)
                own.asked = Loan([], pinned, states)
            return Borrowed.YES
        if any(states):  # windows and states in one model: no such model is known
            return Borrowed.NO
        if own.n_denied >= MAX_LOANS:
            return Borrowed.NO
        most = int(MAX_BORROWED * pool.num_gpu_blocks)
        hit: Sequence[Sequence[KVCacheBlock]] = [()] * len(missing)
        if decision.start:
            hit = self.blocks.cached_blocks(engine_request.block_hashes, engine_request.num_tokens - 1)
        cached = [
            {at: blocks[at] for at in of_table.cached if at < len(blocks) and not blocks[at].is_null}
            for blocks, of_table in zip(hit, missing, strict=True)
        ]
        if n_lost > most or any(len(of_table.cached) > len(cached[table]) for table, of_table in enumerate(missing)):
            return Borrowed.NO
        # vLLM will take what it has found, and takes notice only then that it is in use.
        pinned = [block for of_table in hit for block in of_table if not block.is_null]
        n_free = pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in pinned)
        if n_lost + self.n_borrowed > most or n_lost + self._needed(decision.start, engine_request.num_tokens) > n_free:
            # What is held for a repair may be held as long as its answer takes.
            are_loading = any(other.blocks.held and other.blocks.held_until is None for other in self._requests)
            return Borrowed.LATER if are_loading else Borrowed.NO
        pool.touch(pinned)
        borrowed = pool.get_new_blocks(n_lost)
        self.n_borrowed += n_lost
        left = iter(borrowed)
        numbers = [{at: next(left).block_id for at in of_table.loaded} for of_table in missing]
        for of_table, places in zip(cached, numbers, strict=True):
            places |= {at: block.block_id for at, block in of_table.items()}
        own.asked = Loan(borrowed, pinned, numbers)
        return Borrowed.YES

    def _states_before(self, request: ServedRequest, decision: Decision) -> list[dict[int, int]] | None:
        """The blocks with the states from which a load goes on, for each table, by their place in it; None if vLLM's
        cache has none there. vLLM frees them when it allocates, and may take them at once."""
        places: list[dict[int, int]] = [{} for _ in self.tables.block_sizes]
        if not self.tables.of_states or not decision.start or decision.exact:
            return places
        states = self.blocks.states(request.request, decision.start)
        for table, number in states.items():
            places[table] = {(decision.start - 1) // self.tables.block_sizes[table]: number}
        return places if states else None

    def allocated(self, own: RequestBlocks) -> None:
        """vLLM has allocated blocks for a request that will be loaded."""
        if own.asked:
            self.give_back(own)  # with the time of an earlier load, which must not end this one
            own.held, own.asked = own.asked, None

    def complete(self, own: RequestBlocks, tables: Tables) -> Tables:
        """A request's tables, with what is borrowed for it where vLLM has dropped blocks."""
        if own.held is None:
            return tables
        return [
            [numbers.get(at, NULL_BLOCK) if block == NULL_BLOCK else block for at, block in enumerate(blocks)]
            for blocks, numbers in zip(tables, own.held.numbers, strict=True)
        ]

    def hold_donors(self, request: ServedRequest, unready: set[int]) -> Copies:
        """What the load of a request copies from blocks that vLLM's prefix cache has. These are held until it ends.

        ``unready``: the numbers of blocks that are cached already, and that this step computes. As many free blocks as
        vLLM is to have are left to it. Called when vLLM has allocated all blocks of the step.
        """
        lookup, decision = request.reuse.lookup, request.reuse.decision
        assert lookup and decision
        n_free, taken = self.blocks.pool.get_num_free_blocks() - self.least_free, set[int]()

        def usable(block: KVCacheBlock) -> bool:
            takes = block.ref_cnt == 0 and block.block_id not in taken
            if block.block_id in unready or (takes and len(taken) >= n_free):
                return False
            if takes:
                taken.add(block.block_id)
            return True

        moved = [match for match in decision.sources if match.moved]
        copies = self.donors.find(lookup.request.epoch, moved, usable)
        if copies.blocks:
            self.blocks.pool.touch(copies.blocks)
        request.blocks.donors = copies.blocks
        return copies

    def free_donors(self, own: RequestBlocks) -> None:
        """A load has ended, or was stopped, on all ranks."""
        donors, own.donors = own.donors, []
        if donors:
            self.blocks.pool.free_blocks(reversed(donors))

    def loaded(self, own: RequestBlocks) -> None:
        """A request is loaded; its blended KV may still be stored from the blocks, for a while."""
        if own.held:
            own.held_until = time.monotonic() + self._patience_s

    def hold(self, own: RequestBlocks, tables: Tables) -> None:
        """Hold the blocks that will leave a window; called in each step of a repair, with what vLLM has not freed."""
        own.held_until = time.monotonic() + self._patience_s
        own.held = own.held or Loan([], [], [{} for _ in tables])
        for numbers, table, window in zip(own.held.numbers, tables, self.tables.windows, strict=True):
            if window:
                first = max(numbers, default=-1) + 1
                new = {at: number for at, number in enumerate(table[first:], first) if number != NULL_BLOCK}
                blocks = [self.blocks.pool.blocks[number] for number in new.values()]
                self.blocks.pool.touch(blocks)
                own.held.pinned.extend(blocks)
                numbers |= new

    def end_step(self, are_needed: Callable[[ServedRequest], bool]) -> None:
        """vLLM has planned a step, and this says which requests that are loaded need their blocks besides.

        Given back are the other blocks, and those of requests for which vLLM has not allocated its own.
        """
        now = time.monotonic()
        for request in self._requests:
            own = request.blocks
            if own.asked:
                own.n_denied += 1
                self._give_back_asked(own)
            if own.held_until is not None and (now > own.held_until or not are_needed(request) or self.is_low):
                self.give_back(own)

    def give_back(self, own: RequestBlocks) -> None:
        """Give back the blocks of a request: no step that is still to be planned will use them."""
        loan, own.held, own.held_until = own.held, None, None
        self._free(loan)

    def ended(self, own: RequestBlocks) -> None:
        """A request has ended, which will not be asked for again."""
        self._give_back_asked(own)

    @property
    def is_low(self) -> bool:
        """Whether vLLM may need the blocks for the requests that it has."""
        return self.blocks.pool.get_num_free_blocks() < self.least_free

    @property
    def least_free(self) -> int:
        """With fewer free blocks, vLLM may need those that are lent."""
        return math.ceil(LEAST_FREE * self.blocks.pool.num_gpu_blocks)

    def has_room(self, n_tokens: int) -> bool:
        """Whether there are free blocks for a request of ``n_tokens``."""
        return self._needed(0, n_tokens) <= self.blocks.pool.get_num_free_blocks()

    def _needed(self, start: int, n_tokens: int) -> int:
        """About how many blocks vLLM allocates for a request of ``n_tokens``, if it has those before ``start``."""
        return sum(
            min(-(-n_tokens // size) - start // size, -(-window.size // size) + 1 if window else n_tokens)
            for size, window in zip(self.tables.block_sizes, self.tables.windows, strict=True)
        )

    def _give_back_asked(self, own: RequestBlocks) -> None:
        loan, own.asked = own.asked, None
        self._free(loan)

    def _free(self, loan: Loan | None) -> None:
        if loan:
            self.n_borrowed -= len(loan.borrowed)
            self.blocks.pool.free_blocks([*loan.borrowed, *loan.pinned])
