"""Forwards that serve several requests: what they compute, within which limits, and whom an error concerns."""

from itertools import chain

import numpy as np
import pytest
import torch

from blendhub import PluginHost, Span
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Match, total
from blendhub.vllm.decision import Decision
from blendhub.vllm.worker import forwards
from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.recompute import Blend, BlendContext, HostCopy
from tests.stand_in import StandIn
from tests.vllm.blending import load_job, to_the_end
from tests.vllm.one_group import one_group, pages_in
from tests.vllm.stand_in_model import BLOCK, HEADS, WIDTH, StandInModel
from tests.vllm.two_ranks import ALONE, forward_together, on_two_ranks

LAYERS, N, REQUESTS = 3, 60, 3
LAYOUT = KVLayout(layers=LAYERS, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype="float32", chunk_tokens=32)
HOST = PluginHost.discover()
TOKENS = np.random.default_rng(0).integers(0, 1000, (REQUESTS, N), dtype=np.uint32)
BLOCKS = np.random.default_rng(1).permutation(REQUESTS * 4).reshape(REQUESTS, 4)
"""The blocks of each request; no two requests share one."""
LENGTHS = (N, 45, 52)


class Model(StandInModel):
    """Notes the forwards, and has pages for all requests, which hold numbers that are wrong everywhere."""

    def __init__(self, together=lambda tensor: tensor) -> None:
        super().__init__(together, n_layers=LAYERS)
        self.forwards: list[tuple[int, list[list[Span]]]] = []
        """For each forward: the layer where it ended, 0 if at the last, and the spans of each part."""
        stale = torch.Generator().manual_seed(2)
        for name in self.layer_names:
            pages = torch.randn(BLOCKS.size, HEADS, BLOCK, 2 * WIDTH, generator=stale)
            self.layer(name).kv_cache = pages

    def forward(self, chosen, *, positions=None):
        self.forwards.append((0, [list(part.spans) for part in chosen.parts]))
        super().forward(chosen, positions=positions)

    def forward_until(self, layer, chosen):
        self.forwards.append((layer, [list(part.spans) for part in chosen.parts]))
        return super().forward_until(layer, chosen)


def context_of(selector="first_k", ranks=ALONE, model=None):
    model = model or Model()
    layers = pages_in(model, LAYOUT, BLOCK)
    chooser = HOST.create("selector", selector, {}) if isinstance(selector, str) else selector
    return BlendContext(model, layers, one_group(LAYOUT, BLOCK), StandIn(block_tokens=1), chooser, ranks)


def blends_of(context, numbers=range(REQUESTS), ratio=1.0):
    """Requests of which everything but a hole was found elsewhere."""
    blends = []
    for number in numbers:
        end = LENGTHS[number]
        matches = (Match(Span(0, 20), number, 100, False), Match(Span(24, end), 9, 300, False))
        decision = Decision(0, end, matches, ratio)
        blends.append(Blend(context, load_job(f"r{number}", TOKENS[number], (BLOCKS[number],), decision)))
    return blends


def pages(context):
    return [context.model.layer(name).kv_cache for name in context.model.layer_names]


def alone(number, **options):
    """A request that is blended by itself."""
    ratio = options.pop("ratio", 1.0)
    context = context_of(**options)
    (blend,) = blends_of(context, [number], ratio)
    to_the_end(context, [blend])
    return context, blend


def test_one_forward_computes_all_requests_each_in_its_own_blocks():
    context = context_of()
    to_the_end(context, blends_of(context))
    assert context.model.forwards == [(0, [[Span(0, end)] for end in LENGTHS])]
    for number, end in enumerate(LENGTHS):
        expected = context_of()
        to_the_end(expected, blends_of(expected, [number]))
        at = np.arange(end)
        block, place = BLOCKS[number][at // BLOCK], at % BLOCK
        for ours, theirs in zip(pages(context), pages(expected), strict=True):
            assert torch.equal(ours[block, :, place], theirs[block, :, place])


@pytest.mark.parametrize("selector", ["first_k", "hkvd"])
@pytest.mark.parametrize("budget", [1000, 40, 3, 1])
def test_what_is_chosen_of_a_request_is_what_it_would_be_alone(selector, budget):
    context = context_of(selector)
    blends = blends_of(context, ratio=0.4)
    costs = to_the_end(context, blends, budget)
    assert max(costs) <= budget
    for number, blend in enumerate(blends):
        _, expected = alone(number, ratio=0.4, selector=selector)
        assert blend.result.recomputed == expected.result.recomputed and total(blend.result.recomputed) > 0
        assert blend.result.recompute_seconds > 0


def test_all_probes_are_one_forward_and_so_is_all_recomputation():
    context = context_of("hkvd")
    to_the_end(context, blends_of(context, ratio=0.4))
    assert [(layer, len(parts)) for layer, parts in context.model.forwards] == [(1, REQUESTS), (0, REQUESTS)]


def test_a_long_request_does_not_hold_up_those_behind_it():
    context = context_of()
    blends = blends_of(context)
    Forwards(context).step(blends, 30)
    (_, parts), *_ = context.model.forwards
    assert [total(spans) for spans in parts] == [20, 5, 5]


def test_the_limits_of_a_forward_hold_for_all_requests_together():
    context = context_of("first_k")
    context.model.max_tokens, context.model.max_spans = 50, 4
    to_the_end(context, blends_of(context, ratio=0.4))
    together = [list(chain.from_iterable(parts)) for _, parts in context.model.forwards]
    assert max(map(total, together)) <= 50 and max(map(len, together)) == 4


class Late(HostCopy):
    """Numbers that arrive when the test says so."""

    have_arrived = False

    def numbers(self):
        return super().numbers() if Late.have_arrived else None


def test_no_step_waits_for_scores_and_others_go_on_meanwhile(monkeypatch):
    monkeypatch.setattr(forwards, "HostCopy", Late)
    monkeypatch.setattr(Late, "have_arrived", False)
    context = context_of("hkvd")
    probing, certain = blends_of(context, [0], ratio=0.4), blends_of(context, [1], ratio=1.0)
    steps = Forwards(context)
    for _ in range(3):
        steps.step([*probing, *certain], 1000)
    assert certain[0].result and probing[0].is_waiting
    assert [layer for layer, _ in context.model.forwards] == [0, 1]
    monkeypatch.setattr(Late, "have_arrived", True)
    steps.step(probing, 1000)
    _, expected = alone(0, selector="hkvd", ratio=0.4)
    assert probing[0].result.recomputed == expected.result.recomputed


def test_ranks_go_on_together_when_the_last_of_them_has_the_scores(monkeypatch):
    """A rank that selected alone would begin a forward, and wait in it for the others."""

    def work(ranks):
        monkeypatch.setattr(forwards, "HostCopy", Late)
        context = context_of("hkvd", ranks, Model(forward_together))
        blends = blends_of(context, ratio=0.4)
        steps, costs = Forwards(context), []
        for number in range(4):
            Late.have_arrived = number >= 1 + ranks.number
            costs.append(steps.step(blends, 1000))
        return [bool(cost) for cost in costs], [blend.result.recomputed for blend in blends]

    first, second = on_two_ranks(work)
    assert first == second
    assert first[0] == [True, False, True, False]


class Attention:
    """Each rank holds one half of what each position receives: its token, as a number."""

    last = 1

    def __init__(self, ranks=ALONE):
        self.calls = []
        self._ranks = ranks

    def received(self, asking):
        self.calls.append(len(asking))
        return [torch.from_numpy(one.asking.tokens[: one.stored[-1].end].astype("float32")) / self._ranks.count
                for one in asking]  # fmt: skip


def picked_by_attention(ranks=ALONE, budget=1000):
    context = context_of("attended", ranks, Model(forward_together) if ranks.count > 1 else None)
    context.attention = Attention(ranks)
    blends = blends_of(context, ratio=0.1)
    costs = to_the_end(context, blends, budget)
    return [blend.result.recomputed for blend in blends], context.attention.calls, costs


def test_the_ends_of_all_prompts_ask_in_one_forward_and_each_gets_its_own_answer():
    picked, calls, _ = picked_by_attention()
    assert calls == [REQUESTS]
    for number, spans in enumerate(picked):
        moved = [*range(20), *range(24, LENGTHS[number])]
        highest = sorted(moved, key=lambda at: -int(TOKENS[number][at]))[: -(-len(moved) // 10)]
        assert {at for span in spans for at in range(span.start, span.end)} == set(highest)


def test_a_small_budget_has_one_prompt_ask_in_a_step():
    picked, calls, costs = picked_by_attention(budget=5)
    assert calls == [1, 1, 1] and picked == picked_by_attention()[0]
    # 15 tokens through half of the layers: they begin within the budget.
    assert max(costs) < 5 + 8


def test_what_ranks_receive_is_added_up():
    first, second = on_two_ranks(lambda ranks: picked_by_attention(ranks)[0])
    assert first == second == picked_by_attention()[0]


class Picky:
    """Picks everything, but not of prompts that begin with this token."""

    probe_layer, attended_layers = 0, ()

    def __init__(self, refused):
        self._refused = refused

    def select(self, selection):
        if selection.tokens[0] == self._refused:
            raise KeyError("a mistake")
        return selection.moved


def test_a_selector_that_fails_on_one_request_costs_no_other_its_reuse():
    context = context_of(Picky(TOKENS[1][0]))
    blends = blends_of(context)
    to_the_end(context, blends)
    assert [bool(blend.result) for blend in blends] == [True, False, True]
    assert "KeyError: 'a mistake'" in str(blends[1].error)


class Crowded(Model):
    def forward(self, chosen, *, positions=None):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def test_a_forward_that_fails_fails_all_requests_in_it():
    context = context_of(model=Crowded())
    blends = blends_of(context)
    to_the_end(context, blends)
    assert all("OutOfMemoryError: tried to allocate 2 GiB" in str(blend.error) for blend in blends)
