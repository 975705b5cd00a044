"""Which blocks of vLLM's own cache hold what the hub has stored: with vLLM's own manager of blocks."""

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from blendhub import Match, Span
from blendhub.vllm.scheduler.blocks.block_tables import Window
from blendhub.vllm.scheduler.blocks.donor_blocks import RunName
from tests.vllm.test_scratch import Engine as BlocksOfVllm

MODELS = {
    "one table": [(4, None)],
    "large blocks of a window": [(4, None), (8, Window(20))],
    "large blocks of full attention": [(8, None), (4, Window(9))],
}
HUB = 7
"""The epoch of a hub."""


class Engine(BlocksOfVllm):
    """Requests that vLLM computes, each a run of the hub; what stands in each block is noted when it is computed."""

    def __init__(self, shape: Any, n_blocks: int) -> None:
        super().__init__(shape, n_blocks)
        self.donors = self.scratch.donors
        self.runs: list[Request] = []
        self.running: dict[str, Request] = {}
        self.written: dict[tuple[int, int], list[int]] = {}
        """The tokens up to the end of each block, by table and block."""

    def compute(self, tokens: list[int], stored: list[int]) -> None:
        """``stored``: where the run begins, and where its spans end that were reserved one after the other."""
        hasher, number = get_request_block_hasher(self.hash_size, sha256), len(self.runs)
        request = Request(f"r{number}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        blocks, local = self.manager.get_computed_blocks(request)[:2]
        if self.manager.allocate_slots(request, len(tokens) - local, local, blocks) is None:
            return
        tables = self.manager.get_block_ids(request.request_id)
        for table, ((size, _), numbers) in enumerate(zip(self.shape, tables, strict=True)):
            for place, block in enumerate(numbers):
                if (place + 1) * size > local and block:
                    self.written[table, block] = tokens[: (place + 1) * size]
        self.running[request.request_id] = request
        self.runs.append(request)
        for start, end in pairwise(stored):
            self.donors.remember(RunName(HUB, number), Span(start, end), request.block_hashes)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.integers(16, 80), st.data())
def test_what_is_found_holds_the_run_s_tokens_behind_their_prefix_and_nothing_is_overlooked(model, n_blocks, data):
    engine = Engine(MODELS[model], n_blocks)
    starts: list[int] = []
    for number in range(data.draw(st.integers(1, 10))):
        # Texts begin alike, so that vLLM's cache has the beginnings of some.
        n, same = data.draw(st.integers(2, 90)), data.draw(st.integers(0, 90))
        stored = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=3)))
        engine.compute([7 if at < same else 1000 * number + at for at in range(n)], [*stored, n])
        starts += stored[: len(engine.runs) - len(starts)][:1]
        if engine.running and data.draw(st.booleans()):
            engine.manager.free(engine.running.pop(data.draw(st.sampled_from(sorted(engine.running)))))
        assert sum(len(run.hashes) for run in engine.donors._runs.values()) <= n_blocks
        if engine.runs:
            run = data.draw(st.integers(0, len(engine.runs) - 1))
            check(engine, run, starts[run], data)


def check(engine, run, stored_from, data):
    tokens, hashes, hash_size = engine.runs[run].prompt_token_ids, engine.runs[run].block_hashes, engine.hash_size
    start = data.draw(st.integers(stored_from, len(tokens) - 1))
    end, at = data.draw(st.integers(start + 1, len(tokens))), data.draw(st.integers(0, 40))
    unready = data.draw(st.sets(st.integers(1, 20), max_size=3))
    is_remembered = RunName(HUB, run) in engine.donors._runs
    copies = engine.donors.find(
        HUB, [Match(Span(at, at + end - start), run, start, False)], lambda block: block.block_id not in unready
    )
    assert not engine.donors.find(HUB + 1, [Match(Span(at, at + end - start), run, start, False)], bool).blocks
    read = set()
    for table, (size, _) in enumerate(engine.shape):
        found = {}
        for piece in copies.segments[table]:
            assert piece.source_start - start == piece.span.start - at
            assert piece.source_start % size == piece.row % size
            found |= {
                piece.source_start + n: int(piece.blocks[(piece.row + n) // size]) for n in range(len(piece.span))
            }
        for position in range(start, end):
            last = (position // size + 1) * size
            cached = None
            if is_remembered and last <= len(hashes) * hash_size and last // hash_size > stored_from // hash_size:
                cached = engine.scratch.blocks.cached_block(table, hashes[last // hash_size - 1])
            assert found.get(position) == (cached.block_id if cached and cached.block_id not in unready else None)
            assert position not in found or engine.written[table, found[position]] == tokens[:last]
        read |= set(found.values())
    assert [block.block_id for block in copies.blocks] == list(dict.fromkeys(block.block_id for block in copies.blocks))
    assert {block.block_id for block in copies.blocks} == read
