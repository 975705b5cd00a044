"""Forwards that serve several requests: what they compute, within which limits, and whom an error concerns."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Selector
from blendhub.core.spans import Match, total
from blendhub.vllm.decision import Decision
from blendhub.vllm.model.recompute_set import positions_of
from blendhub.vllm.worker import forwards
from blendhub.vllm.worker.forwards import Forwards, shares
from blendhub.vllm.worker.recompute import Blend, HostCopy
from tests.stand_in import StandIn
from tests.vllm.blending import context_of, load_job, to_the_end
from tests.vllm.stand_in_model import BLOCK, StandInModel
from tests.vllm.two_ranks import ALONE, ENDED, forward_together, on_two_ranks

LENGTHS = (60, 45, 52)
"""The end of what was found of each prompt; its question is behind it."""
TOKENS = np.random.default_rng(0).integers(0, 1000, (len(LENGTHS), 60), dtype=np.uint32)


class Model(StandInModel):
    """Notes the forwards, and has four pages for each request, which hold numbers that are wrong everywhere."""

    def __init__(self, together=lambda tensor: tensor) -> None:
        super().__init__(together, n_layers=3, n_blocks=4 * len(LENGTHS))
        self.forwards: list[tuple[int, list[list[Span]]]] = []
        """For each forward: the layer where it ended, 0 if at the last, and the spans of each part."""
        stale = torch.Generator().manual_seed(2)
        for layer in self._layers.values():
            layer.kv_cache = torch.randn(layer.kv_cache.shape, generator=stale)

    def forward(self, chosen, *, positions=None):
        self.forwards.append((0, [list(part.spans) for part in chosen.parts]))
        super().forward(chosen, positions=positions)

    def forward_until(self, layer, chosen):
        self.forwards.append((layer, [list(part.spans) for part in chosen.parts]))
        return super().forward_until(layer, chosen)


def blends_of(context, numbers=(0, 1, 2), ratio=1.0):
    """Requests of which everything but a hole of four tokens was found elsewhere."""
    blends = []
    for number in numbers:
        matches = (Match(Span(0, 20), number, 100, False), Match(Span(24, LENGTHS[number]), 9, 300, False))
        decision = Decision(0, LENGTHS[number], matches, ratio)
        blends.append(Blend(context, load_job(TOKENS[number], decision, 4 * number)))
    return blends


@lru_cache
def alone(number, selector):
    """What is recomputed of a request that is blended by itself, and the pages that this leaves it in each layer."""
    context = context_of(Model(), selector)
    (blend,) = blends_of(context, [number], 0.4)
    to_the_end(context, [blend])
    return blend.result.recomputed, [pages[4 * number : 4 * number + 4] for pages in context.model.pages]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["first_k", "hkvd"]), st.sampled_from([1, 3, 40, 1000]), st.integers(8, 200), st.integers(1, 64))
def test_requests_that_blend_together_get_what_each_would_get_alone(selector, budget, max_tokens, max_spans):
    context = context_of(Model(), selector)
    context.model.max_tokens, context.model.max_spans = max_tokens, max_spans
    blends = blends_of(context, ratio=0.4)
    assert max(to_the_end(context, blends, budget)) <= budget
    for _, parts in context.model.forwards:
        spans = [span for spans in parts for span in spans]
        assert total(spans) <= max_tokens and len(spans) <= max_spans
    if budget == 1000 and max_tokens >= sum(LENGTHS) and max_spans == 64:
        rounds = [(layer, len(parts)) for layer, parts in context.model.forwards]
        assert rounds == [(1, 3), (0, 3)][selector == "first_k" :], "all probes are one forward, and all recomputation"
    for number, blend in enumerate(blends):
        recomputed, kept = alone(number, selector)
        result = blend.result
        assert result.recomputed == recomputed and result.holes == 4
        if selector == "hkvd":  # the other one also picks the first tokens of what has moved
            assert total(recomputed) == pytest.approx(0.4 * (LENGTHS[number] - 4), abs=1), "holes have no share"
        assert result.probe_seconds > 0 and result.recompute_seconds > 0
        for pages, expected in zip(context.model.pages, kept, strict=True):
            assert pages[4 * number : 4 * number + 4].equal(expected)


needs = st.lists(st.integers(0, 50), max_size=8)


@given(needs, st.integers(0, 200))
def test_all_of_a_budget_is_given_as_long_as_somebody_needs_it_and_one_half_equally(needed, amount):
    result = shares(needed, amount)
    assert len(result) == len(needed) and sum(result) == min(amount, sum(needed))
    for share, need in zip(result, needed, strict=True):
        assert min(need, amount // 2 // len(needed)) <= share <= need


def test_the_rest_of_a_budget_goes_to_the_oldest_and_a_long_request_does_not_hold_up_those_behind_it():
    assert shares([30, 30, 10_000], 120) == [30, 30, 60] and shares([5, 5, 5], 1) == [1, 0, 0]
    context = context_of(Model())
    Forwards(context).step(blends_of(context), 30)
    (_, parts), *_ = context.model.forwards
    assert [total(spans) for spans in parts] == [20, 5, 5]


class Late(HostCopy):
    """Numbers that arrive when the test says so."""

    have_arrived = False

    @property
    def has_arrived(self):
        return Late.have_arrived


def test_no_step_waits_for_scores_and_ranks_go_on_together_when_the_last_of_them_has_these(monkeypatch):
    """A rank that selected alone would begin a forward, and wait in it for the others."""

    def work(ranks):
        monkeypatch.setattr(forwards, "HostCopy", Late)
        context = context_of(Model(forward_together), "hkvd", ranks)
        probing, (certain,) = blends_of(context, [0, 2], ratio=0.4), blends_of(context, [1])
        steps, costs = Forwards(context), []
        for number in range(4):
            Late.have_arrived = number >= 1 + ranks.number
            costs.append(steps.step([*probing, certain], 1000))
            assert certain.result, "others go on meanwhile"
        return [bool(cost) for cost in costs], [blend.result.recomputed for blend in probing]

    expected = [True, False, True, False], [alone(number, "hkvd")[0] for number in (0, 2)]
    assert on_two_ranks(work) == [expected, expected]


class Attention:
    """Each rank holds one half of what each position receives: its token, as a number."""

    last = 1

    def __init__(self, ranks):
        self.calls = []
        self.reserved = 0
        self._ranks = ranks

    def reserve(self, queries):
        self.reserved += 1

    def received(self, queries):
        assert self.reserved == len(self.calls) + 1, "no rank may begin before all have the memory"
        self.calls.append(len(queries))
        tokens = [query.asking.tokens[: query.stored[-1].end] for query in queries]
        return [torch.from_numpy(part.astype("float32")) / self._ranks.count for part in tokens]


def picked_by_attention(ranks, budget=1000):
    context = context_of(Model(forward_together if ranks.count > 1 else lambda tensor: tensor), "attended", ranks)
    context.attention = Attention(ranks)
    blends = blends_of(context, ratio=0.1)
    costs = to_the_end(context, blends, budget)
    return [blend.result.recomputed for blend in blends], context.attention.calls, max(costs)


def test_the_ends_of_all_prompts_ask_in_one_forward_and_each_gets_the_sum_of_its_own_answers():
    picked, calls, _ = picked_by_attention(ALONE)
    assert calls == [len(LENGTHS)]
    for number, spans in enumerate(picked):
        moved = [*range(20), *range(24, LENGTHS[number])]
        highest = sorted(moved, key=lambda at: -int(TOKENS[number][at]))
        beginnings = sorted(moved, key=lambda at: (at - (0 if at < 20 else 24), at))
        in_turn = dict.fromkeys(at for both in zip(highest, beginnings, strict=True) for at in both)
        assert set(positions_of(spans).tolist()) == set([*in_turn][: -(-len(moved) // 10)])
    one_by_one, calls, most = picked_by_attention(ALONE, budget=5)
    # 15 tokens through half of the layers: they begin within the budget.
    assert one_by_one == picked and calls == [1, 1, 1] and most < 5 + 8
    assert [answer[0] for answer in on_two_ranks(picked_by_attention)] == [picked, picked]


class Picking(Selector):
    """Picks all that has moved, but has another answer for prompts that begin with the first token of request 1."""

    def __init__(self, answer, probe_layer=0):
        self.probe_layer = probe_layer
        self.seen = []
        self._answer = answer

    def score(self, fresh, stored):
        if self._answer == "score":
            raise torch.OutOfMemoryError("no memory for scores")
        return torch.ones(len(fresh[0]))

    def select(self, selection):
        self.seen.append(selection)
        if self._answer == "select":
            raise KeyError("a mistake")
        is_other = self._answer and selection.tokens[0] == TOKENS[1][0]
        return self._answer if is_other else selection.moved


def test_a_selector_sees_the_whole_prompt_and_what_it_picks_is_computed_if_it_is_moved_text_of_this_request():
    selector = Picking([Span(22, 30)])  # partly a hole
    context = context_of(Model(), selector, device=StandIn(block_tokens=16, overlaps_compute=True))
    tokens = np.arange(70, dtype=np.uint32)
    matches = (Match(Span(0, 10), 1, 0, True), Match(Span(10, 30), 1, 100, False), Match(Span(40, 50), 2, 300, False))
    job = load_job(tokens, Decision(5, 50, matches, 0.5))
    blends = [*blends_of(context), Blend(context, job)]
    to_the_end(context, blends)
    assert [bool(blend.result) for blend in blends] == [True, False, True, True]
    assert "Picking.select should pick ascending, disjoint parts" in str(blends[1].error)
    asked = selector.seen[-1]
    assert (asked.moved, asked.holes, asked.question) == ([Span(10, 30), Span(40, 50)], [Span(30, 40)], Span(50, 70))
    assert (asked.ratio, asked.block_tokens, asked.scores) == (0.5, 16, None) and asked.tokens is tokens
    computed = [spans for _, parts in context.model.forwards for spans in parts]
    assert [Span(10, 50)] in computed and [Span(0, 45)] not in computed and [Span(20, 30)] not in computed
    context.model.attention = ("the device's",)
    to_the_end(context, [Blend(context, job)])
    assert selector.seen[-1].block_tokens == 1


class Crowded(Model):
    def forward(self, chosen, *, positions=None):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


@pytest.mark.parametrize("place", ["score", "select", "forward", "nowhere"])
def test_where_one_of_two_ranks_fails_both_know_before_the_next_forward_or_the_engine_ends(place):
    """A rank that fails within a forward leaves the other one there."""

    def work(ranks):
        fails = ranks.number == 1
        model = (Crowded if fails and place == "forward" else Model)(forward_together)
        context = context_of(model, Picking(fails and place, probe_layer=1), ranks)
        (blend,) = blends_of(context, [0], 0.5)
        to_the_end(context, [blend], budget=BLOCK)
        return str(blend.error or blend.result.recomputed)

    answers = on_two_ranks(work)
    if place == "forward":
        context = context_of(Crowded())
        blends = blends_of(context)
        to_the_end(context, blends)  # where there is one rank, the forward's requests are computed by vLLM
        assert all("OutOfMemoryError: tried to allocate 2 GiB" in str(blend.error) for blend in blends)
    if place == "nowhere":
        assert answers == [str((Span(0, 20), Span(24, 60)))] * 2
    elif place == "forward":
        assert answers[0] is None and answers[1][0] == ENDED
        assert "OutOfMemoryError: tried to allocate 2 GiB (rank 1 of 2); the engine ends" in answers[1][1]
    else:
        sentence = {"score": "no memory for scores", "select": "KeyError: 'a mistake'"}[place]
        assert all(sentence in answer and answer.endswith("(rank 1 of 2)") for answer in answers)
