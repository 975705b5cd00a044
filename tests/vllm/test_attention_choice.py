"""Up to which length of spans chosen tokens attend by the device, by the times that were measured."""

import logging
import math
import re

import pytest
import torch

from blendhub.vllm.worker import attention_choice
from blendhub.vllm.worker.attention_choice import LENGTHS, SECONDS, choose_attention, longest_attended
from tests.stand_in import Anything, StandIn
from tests.vllm.two_ranks import ALONE


def test_the_device_attends_where_it_is_faster_for_all_shorter_spans_too():
    for ours, longest in (((1, 1, 1, 1), math.inf), ((1, 1, 1, 3), LENGTHS[2]), ((1, 3, 1, 1), LENGTHS[0])):
        assert longest_attended(ours, (2, 2, 2, 2)) == longest
    assert longest_attended((3, 1, 1, 1), (2, 2, 2, 2)) == 0
    assert longest_attended((1, 1), (2, 2)) == LENGTHS[1], "longer spans were not measured"


class Slow(Anything):
    """A model that is also the clock: a forward takes ``seconds``, and half of that by the device, which is off."""

    max_tokens, max_spans, n_blocks, block_size, dtype = 4096, 256, 300, 16, torch.float32
    config = StandIn(model_config=StandIn(max_model_len=4096))

    def __init__(self, seconds: float, off: float = 0.0) -> None:
        self.seconds, self.now, self.off = seconds, 0.0, off
        self.attention, self.attended_length = None, math.inf

    def perf_counter(self):
        return self.now

    def rules(self):
        return []

    def forward(self, chosen):
        self.now += self.seconds / 2 if self.attention else self.seconds
        return torch.ones(len(chosen), 4) + (self.off if self.attention else 0.0)


class Attending(Anything):
    """A device."""

    def attention(self, rules, dtype):
        return "the device's"


@pytest.mark.parametrize("seconds, measured", [(0.15, 4), (0.2, 3), (30.0, 1)])
def test_longer_spans_are_measured_only_while_there_is_time(seconds, measured, monkeypatch, caplog):
    model = Slow(seconds)
    monkeypatch.setattr(attention_choice, "time", model)
    with caplog.at_level(logging.INFO):
        choose_attention(model, Attending(), 0.01, ALONE)
    assert model.now <= SECONDS or measured == 1
    assert (model.attention, model.attended_length) == ("the device's", (*LENGTHS[:3], math.inf)[measured - 1])
    lengths = re.search(r"spans of ([\d, ]+) tokens they take", caplog.text)[1]
    assert lengths == ", ".join(map(str, LENGTHS[:measured]))
    assert ("to measure longer spans would take more than 2 s" in caplog.text) == (measured < 4)


def test_a_device_that_computes_something_else_is_not_used_and_the_log_says_by_how_much(monkeypatch, caplog):
    model = Slow(0.01, off=0.05)
    monkeypatch.setattr(attention_choice, "time", model)
    choose_attention(model, Attending(), 0.01, ALONE)
    assert model.attention is None and "is off by 5.0% (allowed 1.0%)" in caplog.text
