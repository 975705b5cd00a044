"""Whatever becomes of requests, what is called exact is exact, and nothing comes from other text or another salt.

Tests play vLLM and its worker, and note of each token's KV, in vLLM's prefix cache and in the hub's arena, what it was
computed behind: histories of requests that wait, load, compute, are preempted, fail and end, in any order.
"""

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub.core.errors import LeaseError
from blendhub.core.layout import Variant
from blendhub.vllm.messages import LoadResult, WorkerReport
from tests.vllm.played_engine import BLOCK, PlayedEngine, played_engine

EXACT, COMPUTED, BLENDED = "exact", "computed behind blended KV", "blended"
LENGTHS = (48, 80, 33)
"""The lengths of the texts that prompts are made of: some of them end within blocks and chunks."""
PROMPTS = [(0,), (1,), (0, 1), (2, 1), (0, 1, 2), (1, 2), (0, 1, 2, 1), (2, 1, 0)]
ASKED = ({}, {}, {}, {"mode": "exact"}, {"mode": "contiguous"}, {"settled": False}, {"recompute_ratio": 1.0})


class Served:
    """A request, and the kinds of the KV that vLLM has of it."""

    def __init__(self, request, salt, ratio):
        self.request = request
        self.ratio = ratio
        self.salt = salt
        self.kinds = []
        self.load = None
        self.is_running = False
        self.can_be_preempted = False
        """Once vLLM has computed some of it: a request that is only loaded keeps its blocks."""
        self.shown = []
        """The hashes of its blocks that another connector, which is asked after BlendHub, has seen, and keeps."""

    def prefix(self, end):
        """What the KV of the token before ``end`` follows from."""
        return self.salt, tuple(self.request.all_token_ids[:end])


class History:
    """One engine, and what its worker has copied into the slots of the hub."""

    def __init__(self, engine: PlayedEngine, shows_hashes: bool):
        self.engine = engine
        self.shows_hashes = shows_hashes
        self.served = {}
        self.arena, self.n_saved = {}, 0
        self.n_examples = self.n_requests = 0

    def begin(self):
        self.n_examples += 1
        self.served, self.cache = {}, {}
        self.engine.blocks.cached = self.cached
        first = 1000 * self.n_examples
        self.texts = [list(range(first + 200 * number, first + 200 * number + n)) for number, n in enumerate(LENGTHS)]

    def cached(self, hashes, most):
        n = 0
        while n < min(most // BLOCK, len(hashes)) and hashes[n] in self.cache:
            n += 1
        return n * BLOCK

    def arrive(self, parts, n_new, salt, asked):
        self.n_requests += 1
        prompt = [token for part in parts for token in self.texts[part]]
        prompt += range(10**6 + 1000 * self.n_requests, 10**6 + 1000 * self.n_requests + n_new)
        request = self.engine.arrived(f"r{self.n_requests}", prompt, salt=salt, **asked)
        self.served[request.request_id] = Served(request, salt, asked.get("recompute_ratio", 0.15))
        if lookup := self.engine.side.requests.known[request.request_id].reuse.lookup:
            assert lookup.done(10)

    def turn(self, served):
        request = served.request
        for _ in range(20):
            local = self.cached(request.block_hashes, request.num_tokens - 1)
            n_external, _ = self.engine.turn(request, local)
            if n_external is not None:
                break
            self.engine.step()
        else:
            return  # it waits for another one that is blended
        served.shown += request.block_hashes[len(served.shown) :]
        served.kinds = []
        for number in range(local // BLOCK):
            prefix, kinds, ratio = self.cache[request.block_hashes[number]]
            assert prefix == served.prefix((number + 1) * BLOCK)
            assert set(kinds) == {EXACT} or ratio >= served.ratio, "it asked for more to be recomputed"
            served.kinds += kinds
        served.is_running = not n_external
        self.engine.side.allocated(request, (list(range(1, 40)),), n_external)
        self.step(served, 0)
        if n_external:
            (served.load,) = self.engine.loads
            self.check(served, served.load.source.pieces, served.load.decision.matches)

    def check(self, served, pieces, matches):
        """What is found has the tokens that it should have, behind the prefix that it should stand behind."""
        for piece in pieces:
            match = next(match for match in matches if piece.span.start in range(match.span.start, match.span.end))
            for at in range(piece.span.start, piece.span.end):
                (salt, tokens), kind = self.arena[piece.shard, piece.row + at - piece.span.start]
                expected = served.prefix(at + 1)
                assert salt == expected[0] and tokens[-1] == expected[1][-1]
                assert tokens == expected[1] or match.moved
                assert kind == EXACT or not match.exact
                assert kind != BLENDED or match.settled, "KV that was blended is moved"

    def end_load(self, served, error):
        load, served.load, served.is_running = served.load, None, True
        try:
            self.engine.client.release(load.source.lease).result()
        except LeaseError as gone:  # it was cleared
            error = str(gone)
        self.engine.side.process_report(WorkerReport(loads={load.request: LoadResult(error=error)}))
        if not error:
            decision = load.decision
            kinds = {
                at: kind
                for spans, kind in ((decision.exact, EXACT), (decision.settled, BLENDED), (decision.moved, BLENDED))
                for span in spans
                for at in range(span.start, span.end)
            }
            for at in range(decision.start, decision.end):
                served.kinds.append(kinds.get(at) or self.computed(served))
            self.keep(served)

    def computed(self, served):
        return EXACT if all(kind == EXACT for kind in served.kinds) else COMPUTED

    def step(self, served, n):
        """vLLM computes so many tokens of a request."""
        before = len(served.kinds)
        served.kinds += [self.computed(served)] * n
        self.engine.step(**({served.request.request_id: (before, n)} if n else {}))
        self.keep(served)

    def keep(self, served):
        """Note what the worker has saved, and what vLLM's prefix cache has now."""
        for job in self.engine.saved[self.n_saved :]:
            saver = self.served[job.request]
            for row, at in enumerate(range(job.slot.span.start, job.slot.span.end)):
                self.arena[job.slot.slot, row] = saver.prefix(at + 1), saver.kinds[at]
        self.n_saved = len(self.engine.saved)
        request = served.request
        variant = Variant(cache_salt=served.salt or "")
        tokens = np.asarray(request.all_token_ids, np.uint32)
        with closing(self.engine.client.lookup(tokens, variant, settled=0.0)) as lookup:
            self.check(served, lookup.result().pieces, lookup.result().matches)
        own = self.engine.request("twin", list(request.all_token_ids), served.salt).block_hashes
        for number in range(len(served.kinds) // BLOCK):
            kinds = served.kinds[number * BLOCK : (number + 1) * BLOCK]
            hashes = {request.block_hashes[number], *(served.shown[number:][:1] if self.shows_hashes else [])}
            assert set(kinds) == {EXACT} or not hashes & set(own), "blended KV has its text's hash"
            prefix = served.prefix((number + 1) * BLOCK)
            self.cache.setdefault(request.block_hashes[number], (prefix, kinds, served.ratio))

    def compute(self, served, n):
        served.can_be_preempted = True
        self.step(served, min(n, served.request.num_tokens - len(served.kinds)))
        if len(served.kinds) == served.request.num_tokens:
            served.request.append_output_token_ids(list(range(n % 40 + 1)))

    def preempt(self, served):
        served.kinds, served.is_running, served.can_be_preempted = [], False, False
        served.request.num_computed_tokens = 0

    def end(self, served):
        load, served.load = served.load, None
        self.engine.end(served.request, len(served.kinds))
        self.keep(served)
        del self.served[served.request.request_id]
        if load:
            self.engine.side.process_report(WorkerReport(loads={load.request: LoadResult(error="it was aborted")}))


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "beside another connector"])
def history(request):
    with played_engine(shows_hashes=request.param) as engine:
        yield History(engine, request.param)


EVENTS = st.tuples(
    st.integers(0, 99),
    st.sampled_from(PROMPTS),
    st.sampled_from([None, None, None, "salt"]),
    st.sampled_from(ASKED),
    st.integers(1, 200),
)
"""What happens, the prompt, salt and parameters of the request that arrives, and how much vLLM computes."""


@settings(max_examples=40, deadline=None)
@given(st.lists(EVENTS, min_size=30, max_size=60))
def test_nothing_is_exact_that_is_not(history, events):
    history.begin()
    for number, parts, salt, asked, n in events:
        served = list(history.served.values())
        ways: list[Any] = [partial(history.arrive, parts, max(0, n - 100), salt, asked)] * (4 - len(served))
        ways += [lambda: history.engine.client.clear().result(), lambda: history.cache and history.cache.popitem()]
        for one in served:
            ways.append(partial(history.end, one))
            if one.load:
                ways += [partial(history.end_load, one, "")] * 3 + [partial(history.end_load, one, "the hub is gone")]
            elif one.is_running:
                ways += [partial(history.compute, one, n)] * 4 + [partial(history.preempt, one)] * one.can_be_preempted
            else:
                ways += [partial(history.turn, one)] * 4
        ways[number % len(ways)]()
    for one in list(history.served.values()):
        history.end(one)
    history.engine.settle()
    history.engine.eventually(lambda: not history.engine.leases())
    assert not history.engine.side.has_work
