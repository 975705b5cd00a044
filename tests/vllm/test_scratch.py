"""Blocks that vLLM's own manager lends while a prompt of a model with windows is blended."""

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from blendhub import Match, Span
from blendhub.vllm.decision import Decision
from blendhub.vllm.scheduler.blocks.block_tables import Window, block_tables_of
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.blocks.scratch import Borrowed, Scratch
from blendhub.vllm.scheduler.request.blocks import RequestBlocks
from tests.stand_in import StandIn

init_none_hash(sha256)
MODELS = {
    "one window": [(4, None), (4, Window(8))],
    "two windows": [(4, None), (4, Window(10)), (4, Window(3))],
    "large blocks of full attention": [(8, None), (4, Window(9))],
    "large blocks of a window": [(4, None), (8, Window(20))],
    "no full attention": [(4, Window(6))],
    "chunks": [(4, None), (4, Window(12, is_chunk=True))],
    "chunks that end within blocks": [(4, None), (4, Window(10, is_chunk=True))],
}
"""The tokens of a block and the window of each table."""
LONGEST = 96


def spec_of(window, **common):
    if window is None:
        return FullAttentionSpec(**common)
    if window.is_chunk:
        return ChunkedLocalAttentionSpec(attention_chunk_size=window.size, **common)
    return SlidingWindowSpec(sliding_window=window.size, **common)


class Engine:
    """vLLM's manager of blocks and what its scheduler does with it."""

    def __init__(self, shape, n_blocks):
        common: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        specs = [spec_of(window, block_size=size, **common) for size, window in shape]
        groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
        config = KVCacheConfig(num_blocks=n_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        sizes = [size for size, _ in shape]
        self.shape, self.hash_size = shape, math.gcd(*sizes)
        self.manager = KVCacheManager(
            config,
            max_model_len=LONGEST,
            scheduler_block_size=math.lcm(*sizes),
            hash_block_size=self.hash_size,
        )
        blocks = EngineBlocks(block_tables_of(config))
        blocks.manager = self.manager
        self.requests: Any = []
        """Those of which the scheduler side knows."""
        self.scratch = Scratch(blocks, cast(Any, self.requests), patience_s=10.0)
        self.served = {}
        self.n_asked = 0

    @property
    def n_free(self):
        return self.manager.block_pool.get_num_free_blocks()

    def ask(self, tokens, end):
        """A request whose prompt is moved text up to ``end``; returns what ``borrow`` answered."""
        self.n_asked += 1
        hasher = get_request_block_hasher(self.hash_size, sha256)
        request = Request(f"r{self.n_asked}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        blocks, local = self.manager.get_computed_blocks(request)[:2]
        if end <= local:
            return None
        decision = Decision(local, end, (Match(Span(local, end), 1, 0, False),), 0.5)
        known = [one for one in self.requests if one.request.request_id == request.request_id]
        own = known[0].blocks if known else RequestBlocks()
        asking = StandIn(request=request, reuse=StandIn(decision=decision), blocks=own)
        self.requests.append(asking)
        lent = self.scratch.borrow(asking)
        if lent is Borrowed.YES:
            tables = self.manager.allocate_slots(
                request, 0, local, blocks, num_external_computed_tokens=end - local, delay_cache_blocks=True
            )
            if tables is not None:
                self.scratch.allocated(own)
                used = self.scratch.complete(own, self.manager.get_block_ids(request.request_id))
                self.served[request.request_id] = StandIn(
                    request=request, local=local, end=end, tables=used, is_loaded=False, blocks=own
                )
        self.scratch.end_step(lambda name: False)
        return lent

    def loaded(self, name):
        """The load has ended, and vLLM computes the rest of the prompt if it has room."""
        served = self.served[name]
        served.is_loaded, served.request.num_computed_tokens = True, served.end
        self.scratch.loaded(served.blocks)
        self.scratch.end_step(lambda name: False)
        self.manager.cache_blocks(served.request, served.end)
        if self.manager.allocate_slots(served.request, served.request.num_tokens - served.end):
            served.request.num_computed_tokens = served.request.num_tokens

    def end(self, name):
        """The request has ended, or was aborted while it was loaded."""
        served = self.served.pop(name)
        self.scratch.ended(served.blocks)
        self.scratch.give_back(served.blocks)
        self.manager.free(served.request)

    def check(self):
        """What is loaded has blocks for all that recomputed tokens attend to, and none of them has another use."""
        uses = {}
        for name, served in self.served.items():
            tables = self.manager.get_block_ids(name) if served.is_loaded else served.tables
            for number, ((size, window), table) in enumerate(zip(self.shape, tables, strict=True)):
                if not served.is_loaded:
                    first = window.begin(served.local) if window else 0
                    assert all(table[at // size] for at in range(first, served.end))
                for place, block in enumerate(table):
                    text = tuple(served.request.prompt_token_ids[: (place + 1) * size])
                    is_shared = (place + 1) * size <= served.local
                    if block:
                        assert self.manager.block_pool.blocks[block].ref_cnt > 0
                        use = uses.setdefault(block, (number, place, text if is_shared or served.is_loaded else name))
                        assert use[:2] == (number, place)
                        assert is_shared or served.is_loaded or use[2] == name


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(24, 120), st.data())
def test_no_block_has_two_uses_and_all_are_given_back(model, n_blocks, data):
    engine = Engine(MODELS[model], n_blocks)
    n_free = engine.n_free
    for _ in range(data.draw(st.integers(1, 12))):
        loading = [name for name, served in engine.served.items() if not served.is_loaded]
        action = data.draw(st.sampled_from(["ask", "ask", "loaded", "end"]))
        if action == "ask":
            # Texts begin alike, so that vLLM's cache has the beginnings of some.
            n, same = data.draw(st.integers(2, LONGEST - 1)), data.draw(st.integers(0, LONGEST))
            tokens = [7 if at < same else 1000 * engine.n_asked + at for at in range(n)]
            engine.ask(tokens, data.draw(st.integers(1, n - 1)))
        elif action == "loaded" and loading:
            engine.loaded(data.draw(st.sampled_from(loading)))
        elif action == "end" and engine.served:
            engine.end(data.draw(st.sampled_from(sorted(engine.served))))
        engine.check()
        most = n_blocks // 2
        assert engine.scratch.n_borrowed <= most
    for name in list(engine.served):
        engine.end(name)
    assert engine.scratch.n_borrowed == 0 and engine.n_free == n_free


def moved(number):
    return list(range(1000 * number, 1000 * number + LONGEST - 1))


@pytest.mark.parametrize("n_blocks", range(76, 96))
def test_what_vllm_has_found_in_its_cache_is_not_lent(n_blocks):
    """vLLM finds blocks first and takes them last. These were used longest ago, so they would be lent first."""
    engine = Engine(MODELS["one window"], n_blocks)
    prefix = [7] * 40
    for name, tokens in (("r1", [*prefix, 1]), ("r2", moved(0))):
        assert engine.ask(tokens, len(tokens) - 1) is Borrowed.YES
        engine.loaded(name)
        engine.end(name)
    engine.ask(moved(1), 94)  # it takes blocks that nothing is cached in
    engine.ask([*prefix, *moved(2)[40:]], 94)
    engine.check()


def test_a_request_waits_for_others_scratch_and_does_without_if_there_is_none(monkeypatch):
    """vLLM must never wait for ever: with nothing lent, what does not fit is refused."""
    engine = Engine(MODELS["one window"], 60)
    assert engine.ask(moved(0), 94) is Borrowed.YES  # 24 blocks, and 21 borrowed
    assert engine.ask(moved(1), 94) is Borrowed.LATER and len(engine.served) == 1
    assert engine.ask(moved(2), 8) is Borrowed.YES  # it needs none
    engine.loaded("r1")
    engine.end("r1")
    assert engine.ask(moved(1), 94) is Borrowed.YES
    small = Engine(MODELS["one window"], 30)
    assert small.ask(moved(0), 94) is Borrowed.NO and not small.served
    # What is held for the repair of an answer may be held for long.
    engine.loaded("r4")
    engine.scratch.hold(engine.served["r4"].blocks, engine.manager.get_block_ids("r4"))
    assert engine.ask(moved(5), 94) is Borrowed.NO
    # The estimate of what vLLM needs beside it may be too low, and vLLM asks again in each step.
    engine = Engine(MODELS["one window"], 60)
    monkeypatch.setattr(engine.manager, "allocate_slots", lambda *given, **named: None)
    n_free, answers = engine.n_free, []
    for _ in range(20):
        engine.n_asked = 0
        answers.append(engine.ask(moved(0), 94))
        assert engine.n_free == n_free
    assert answers[0] is Borrowed.YES and answers[-1] is Borrowed.NO


def test_what_was_held_of_a_request_before_it_was_preempted_ends_no_later_load_of_it():
    engine = Engine(MODELS["one window"], 120)
    engine.ask(moved(0), 94)
    engine.loaded("r1")
    engine.scratch.hold(engine.served["r1"].blocks, engine.manager.get_block_ids("r1"))
    engine.scratch.end_step(lambda name: True)  # some of it is still to be stored
    engine.manager.free(engine.served.pop("r1").request)
    engine.manager.reset_prefix_cache()
    engine.n_asked = 0
    assert engine.ask([7, *moved(0)[1:]], 94) is Borrowed.YES
    engine.check()
