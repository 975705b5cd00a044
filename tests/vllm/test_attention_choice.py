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


@pytest.mark.parametrize(
    "ours, longest",
    [
        ((1, 1, 1, 1), math.inf),
        ((1, 1, 1, 3), LENGTHS[2]),
        ((1, 3, 1, 1), LENGTHS[0]),
        ((3, 1, 1, 1), 0),
        ((1, 1), LENGTHS[1]),
    ],
    ids=[
        "always",
        "but not for long spans",
        "only for the shortest",
        "not even for the shortest",
        "as far as is known",
    ],
)
def test_the_device_attends_where_it_is_faster_for_all_shorter_spans_too(ours, longest):
    assert longest_attended(ours, (2, 2, 2, 2)[: len(ours)]) == longest


class Slow(Anything):
    """A model that is also the clock: a forward takes ``seconds``, and half of that by the device."""

    max_tokens, max_spans, n_blocks, block_size, dtype = 4096, 256, 300, 16, torch.float32
    config = StandIn(model_config=StandIn(max_model_len=4096))

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.attention, self.attended_length = None, math.inf

    def perf_counter(self):
        return self.now

    def rules(self):
        return []

    def forward(self, chosen):
        self.now += self.seconds / 2 if self.attention else self.seconds
        return torch.ones(len(chosen), 4)


class Attending(Anything):
    """A device."""

    def attention(self, rules, dtype):
        return "the device's"


@pytest.mark.parametrize("seconds, measured", [(0.01, 4), (0.15, 4), (0.2, 3), (0.4, 1), (30.0, 1)])
def test_longer_spans_are_measured_only_while_there_is_time(seconds, measured, monkeypatch, caplog):
    model = Slow(seconds)
    monkeypatch.setattr(attention_choice, "time", model)
    with caplog.at_level(logging.INFO):
        choose_attention(model, Attending(), 0.01, ALONE)
    assert model.now <= SECONDS or measured == 1
    assert (model.attention, model.attended_length) == ("the device's", (*LENGTHS[:3], math.inf)[measured - 1])
    assert re.search(r"spans of ([\d, ]+) tokens they take", caplog.text)[1].split(", ") == [
        *map(str, LENGTHS[:measured])
    ]
    assert ("to measure longer spans would take more than 2 s" in caplog.text) == (measured < 4)
