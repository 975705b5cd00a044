"""The blocks with states of a repair: vLLM's own manager lends them, and its prefix cache gets no approximate state."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

from blendhub import Match, Span
from blendhub.core.layout import Variant
from blendhub.vllm.decision import Choice, Decision
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.scheduler.blocks.block_tables import block_tables_of
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.blocks.exact_states import ExactStates
from blendhub.vllm.scheduler.request.reuse import Stage
from blendhub.vllm.scheduler.request.served_request import ServedRequest
from blendhub.vllm.scheduler.request.terms import Terms

init_none_hash(sha256)
SIZE, LONGEST, TABLES = 8, 200, (1, 2)
"""The tokens of a block, the longest request, and the tables of recurrent layers."""


class Engine:
    """vLLM's manager of blocks, what its scheduler does with it, and what a worker has in the blocks of states."""

    def __init__(self, n_blocks: int) -> None:
        common: dict[str, Any] = {"shapes": ((4,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
        specs: list[Any] = [FullAttentionSpec(SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)]
        specs += [MambaSpec(SIZE, **common) for _ in TABLES]
        groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks=n_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(config, LONGEST, scheduler_block_size=SIZE, hash_block_size=SIZE)
        blocks = EngineBlocks(block_tables_of(config))
        blocks.manager = self.manager
        self.blocks, self.states = blocks, ExactStates(blocks)
        self.held: dict[int, tuple[bool, int]] = {}
        """By block with a state: whether it is exact, and how many tokens it stands behind."""
        self.n_requests = 0

    @property
    def n_free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def load(self, n_prompt: int, first: int, end: int, least_free: int = 0) -> ServedRequest | None:
        """A request whose text is moved from ``first`` to ``end``; None if vLLM has no blocks for it."""
        self.n_requests += 1
        tokens = [1000 * self.n_requests + at for at in range(n_prompt)]
        hasher = get_request_block_hasher(SIZE, sha256)
        sampling = SamplingParams(max_tokens=99)
        asked = Request(f"r{self.n_requests}", tokens, sampling, None, block_hasher=hasher)
        request = ServedRequest(asked, Terms(Variant(), "blend", 0.0, stores=True, repairable=True), SIZE)
        decision = Decision(0, end, (Match(Span(first, end), 1, 0, False),), 0.0)
        request.reuse.choice, request.reuse.stage = Choice(decision), Stage.LOADING
        allocated = self.manager.allocate_slots(asked, 0, num_external_computed_tokens=end, delay_cache_blocks=True)
        if allocated is None:
            return None
        keeps = self.states.borrow(request, least_free)
        assert bool(keeps) == (request.blocks.exact_state is not None) and set(keeps) <= set(TABLES)
        request.begin_load(decision)
        request.end_load(LoadResult())
        asked.num_computed_tokens = end
        self.manager.cache_blocks(asked, end)
        for table in TABLES:
            self.held[self.live(request, table, end)] = False, end
            if keeps:
                self.held[keeps[table]] = True, first
        return request

    def live(self, request: ServedRequest, table: int, end: int) -> int:
        """The block with the state behind so many tokens."""
        block = self.blocks.of(request.id)[table][(end - 1) // SIZE]
        assert block, "vLLM has freed a state with which the request goes on"
        return block

    def step(self, request: ServedRequest, n_tokens: int) -> bool:
        """The request computes tokens; vLLM copies the state into another block where one begins."""
        asked = request.request
        before = asked.num_computed_tokens
        if not self.manager.allocate_slots(asked, n_tokens):
            return False
        for table in TABLES:
            is_exact, end = self.held[self.live(request, table, before)]
            assert end == before
            self.held[self.live(request, table, before + n_tokens)] = is_exact, before + n_tokens
        asked.num_computed_tokens = before + n_tokens
        if asked.num_computed_tokens == asked.num_tokens:
            asked.append_output_token_ids(7)
        return True

    def repair(self, request: ServedRequest) -> int:
        """A worker repairs the request, up to its last computed token; returns the end of that."""
        states, end = self.states.of_repair(request.blocks), request.request.num_computed_tokens
        assert states and not self.states.lacks_live(self.blocks.of(request.id), end)
        for table in TABLES:
            assert self.held[states.running[table]] == (True, request.first_approximate)
            self.held[states.running[table]] = self.held[self.live(request, table, end)] = True, end
            if states.shown:
                assert states.shown_end <= end
                self.held[states.shown[table]] = True, states.shown_end
        return end

    def told(self, request: ServedRequest, exact_end: int) -> None:
        """The scheduler side hears that the request is repaired, as in ``Repairs``."""
        first, tables = request.first_approximate, self.blocks.of(request.id)
        assert first is not None
        tables = self.states.exact_tables(request.blocks, tables, exact_end)
        request.kv.repaired()
        request.hashes.restore()
        self.blocks.cache_anew(request.request, tables, first, request.computed_end)
        self.states.give_back(request.blocks)

    def found(self, request: ServedRequest) -> dict[int, tuple[bool, int]]:
        """By the numbers of tokens behind which vLLM's cache has states for others: what they are."""
        states: dict[int, tuple[bool, int]] = {}
        for number, name in enumerate(request.hashes.own()):
            cached = self.manager.block_pool.get_cached_block(name, list(TABLES))
            for block in cached or ():
                states[(number + 1) * SIZE] = self.held[block.block_id]
        return states

    def check(self, requests: list[ServedRequest]) -> None:
        used = [
            block.block_id
            for request in requests
            if (state := request.blocks.exact_state)
            for block in (*state.running.values(), *state.shown.values())
        ]
        of_requests = {block for request in requests for table in self.blocks.of(request.id) for block in table}
        assert len(set(used)) == len(used) and of_requests.isdisjoint(used)
        for request in requests:
            assert all(state == (True, end) for end, state in self.found(request).items())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_blocks_have_one_use_and_go_back_and_vllm_shows_exact_states_only(data):
    engine = Engine(data.draw(st.integers(20, 120)))
    n_free, requests = engine.n_free, list[ServedRequest]()
    repaired: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["load", "step", "step", "step", "repair", "tell", "end"]))
        request = data.draw(st.sampled_from(requests)) if requests else None
        if action == "load":
            n_prompt = data.draw(st.integers(10, 70))
            first = data.draw(st.integers(1, n_prompt - 3))
            end = data.draw(st.integers(first + 1, n_prompt - 1))
            request = engine.load(n_prompt, first, end, data.draw(st.integers(0, 20)))
            requests += [request] if request else []
        elif action == "step" and request:
            left = request.request.num_tokens - request.request.num_computed_tokens
            engine.step(request, left if data.draw(st.booleans()) else data.draw(st.integers(1, left)))
        elif action == "repair" and request and request.blocks.exact_state and request.is_answering:
            if request.id not in repaired:
                repaired[request.id] = engine.repair(request)
        elif action == "tell" and request and request.id in repaired and request.first_approximate is not None:
            engine.told(request, repaired[request.id])
        elif action == "end" and request:
            engine.states.give_back(request.blocks)
            engine.manager.free(request.request)
            requests.remove(request)
        engine.check(requests)
    for request in requests:
        engine.states.give_back(request.blocks)
        engine.manager.free(request.request)
    assert engine.n_free == n_free


@pytest.mark.parametrize("n_prompt", [40, 41, 48, 55])
@pytest.mark.parametrize("n_answer", [1, 9, 30])
@pytest.mark.parametrize("lag", [0, 2])
def test_the_next_turn_finds_the_last_state_of_the_prompt_or_a_later_one(n_prompt, n_answer, lag):
    """``lag``: how many steps vLLM has planned when the scheduler side hears of the repair."""
    engine = Engine(120)
    request = engine.load(n_prompt, first=9, end=n_prompt - 3)
    assert request
    engine.step(request, 3)
    for _ in range(n_answer):
        engine.step(request, 1)
    assert engine.found(request) == {}, "all states are approximate, and hashes are salted"
    exact_end = engine.repair(request)
    for number in range(10):
        if number == lag:
            engine.told(request, exact_end)
        engine.step(request, 1)
    last = (n_prompt - 1) // SIZE * SIZE
    ends = range(max(last, exact_end) // SIZE * SIZE, exact_end + 11, SIZE)
    # If a block was full when the repair ended, vLLM may have freed it by then.
    expected = {last, *(end for end in ends if end > max(last, exact_end - (not lag)))}
    assert set(engine.found(request)) == expected
    engine.check([request])
