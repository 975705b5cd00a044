"""What a worker's start measures of its model and its device: alike on all ranks, within bounds, or not at all."""

import logging

import pytest

from blendhub.core.spans import Span
from blendhub.vllm.model.layer_groups import attach
from blendhub.vllm.worker.start import measured_costs
from blendhub.vllm.worker.start.measured_costs import SECONDS, measure_costs
from tests.vllm.blending import HOST, context_of
from tests.vllm.stand_in_model import BLOCK, StandInModel
from tests.vllm.two_ranks import ALONE, forward_together, on_two_ranks

BLOCKS = 1 + 2048 // BLOCK


class Slow(StandInModel):
    """A model that is also the clock: each token of a forward takes so long."""

    n_blocks, attention, now = BLOCKS, (), 0.0

    def __init__(self, token_s=0.0, max_tokens=4096, **arguments):
        super().__init__(n_blocks=BLOCKS, **arguments)
        self.token_s, self.max_tokens = token_s, max_tokens

    def perf_counter(self):
        return self.now

    def forward(self, chosen, *, positions=None):
        self.now += self.token_s * len(chosen)
        super().forward(chosen, positions=positions)


class Full(Slow):
    def forward(self, chosen, *, positions=None):
        raise RuntimeError("out of memory")


def measured(model, *, load_s=0.0, ranks=ALONE):
    """``load_s``: how long the device takes for each token that it loads."""
    device = HOST.create("device", "cpu", {})
    context = context_of(model, "first_k", ranks, device)
    attach(device, context.groups, context.layers)
    load = device._load

    def slow(segments, block_ids, group):
        model.now += load_s * sum(len(segment.span) for segment in segments)
        return load(segments, block_ids, group)

    device._load = slow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_costs, "time", model)
        return measure_costs(context)


def test_ranks_agree_on_what_the_slowest_takes():
    def work(ranks):
        model = Slow(3e-4 if ranks.number else 0.0, together=forward_together)
        return measured(model, load_s=0.0 if ranks.number else 2e-4, ranks=ranks)

    costs, same = on_two_ranks(work)
    assert costs == same
    for cost, token_s in ((costs.load, 2e-4), (costs.prefill, 3e-4)):
        assert cost.seconds(cost.sum([Span(0, 500)])) == pytest.approx(500 * token_s, rel=1e-3)
    assert costs.engine_tokens == StandInModel.max_tokens


@pytest.mark.parametrize(
    "token_s, max_tokens, longest", [(1e-4, 4096, 2032), (5e-4, 1088, 1072), (1e-3, 4096, 256), (1e-3, 256, 240)]
)
def test_longer_prompts_are_measured_while_there_is_time_up_to_the_longest_that_fits(
    token_s, max_tokens, longest, caplog
):
    model = Slow(token_s, max_tokens)
    with caplog.at_level(logging.INFO):
        assert measured(model).prefill.token == pytest.approx(token_s)
    assert model.now <= SECONDS * 4 / 3 and f"measured on {longest} tokens" in caplog.text


@pytest.mark.parametrize(
    "model, sentence",
    [
        (Slow(0.02), "3 lengths of prompts take more than 3 s"),
        (Slow(max_tokens=64), "prompts of 48 tokens at most fit; max_num_batched"),
        (Full(), "out of memory"),
    ],
)
def test_without_times_nothing_is_refused_by_time_and_one_line_says_so(model, sentence, caplog):
    with caplog.at_level(logging.INFO):
        assert measured(model) is None
    (line,) = (record.message for record in caplog.records if record.name.endswith("measured_costs"))
    assert line.startswith("reuse is not compared with prefill by time") and sentence in line
