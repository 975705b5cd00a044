"""The states of recurrent layers with which a request is repaired.

Of a request, vLLM keeps one state: that with which its answer goes on. A repair goes on from the state before the first
moved text, in blocks of its own, which vLLM's pool lends from the load on until the repair has ended. They are counted
as the request's own are, and go back when vLLM is short of blocks.
"""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from blendhub.vllm.messages import NULL_BLOCK, RepairStates, StateBlocks
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.request.blocks import ExactState, RequestBlocks, Tables
from blendhub.vllm.scheduler.request.served_request import ServedRequest


class ExactStates:
    """All methods are called by the scheduler's thread."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._of_states = blocks.tables.of_states

    @property
    def are_needed(self) -> bool:
        """Whether a repair needs states."""
        return bool(self._of_states)

    def borrow(self, request: ServedRequest, least_free: int) -> StateBlocks:
        """Borrow blocks for a request that begins to load moved text, if ``least_free`` blocks are left then. Returns
        those for the states before the first moved text; none without such text, or without recurrent layers."""
        decision, own = request.reuse.decision, request.blocks
        self.give_back(own)
        first = decision.first_approximate if decision else None
        if first is None or not self._of_states or not request.is_repairable:
            return {}
        # The next turn goes on from the last state that vLLM keeps of a prompt, and so does the hub.
        size = self._blocks.tables.block_sizes[self._of_states[0]]
        shown_end = (request.request.num_prompt_tokens - 1) // size * size
        is_shown = shown_end > first
        n = len(self._of_states) * (1 + is_shown)
        pool = self._blocks.pool
        if pool.get_num_free_blocks() - n < least_free:
            return {}
        borrowed = iter(pool.get_new_blocks(n))
        running = {table: next(borrowed) for table in self._of_states}
        shown = {table: next(borrowed) for table in self._of_states} if is_shown else {}
        own.exact_state = ExactState(first, running, shown, shown_end if is_shown else 0)
        return _numbers(running)

    def give_back(self, own: RequestBlocks) -> None:
        """No step that is still to be planned will use them."""
        state, own.exact_state = own.exact_state, None
        if state:
            self._blocks.pool.free_blocks([*state.running.values(), *state.shown.values()])

    def of_repair(self, own: RequestBlocks) -> RepairStates | None:
        """The states of a repair that is under way."""
        if not (state := own.exact_state):
            return None
        return RepairStates(running=_numbers(state.running), shown=_numbers(state.shown), shown_end=state.shown_end)

    def lacks_live(self, tables: Tables, end: int) -> bool:
        """Whether vLLM has freed the state behind the first ``end`` tokens, with which an answer goes on."""
        sizes = self._blocks.tables.block_sizes
        return any(tables[table][(end - 1) // sizes[table]] == NULL_BLOCK for table in self._of_states)

    def exact_tables(self, own: RequestBlocks, tables: Tables, exact_end: int) -> Tables:
        """A request's tables without states that are approximate: those behind fewer than ``exact_end`` tokens, except
        for the one that the repair has copied."""
        exact, state = list(tables), own.exact_state
        for table in self._of_states:
            size = self._blocks.tables.block_sizes[table]
            n_approximate = (exact_end - 1) // size
            blocks = [NULL_BLOCK] * n_approximate + [*tables[table][n_approximate:]]
            if state and 0 < state.shown_end < exact_end:
                blocks[state.shown_end // size - 1] = state.shown[table].block_id
            exact[table] = blocks
        return exact


def _numbers(blocks: dict[int, KVCacheBlock]) -> StateBlocks:
    return {table: block.block_id for table, block in blocks.items()}
