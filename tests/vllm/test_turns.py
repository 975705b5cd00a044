"""Requests that vLLM would compute wait for earlier ones that are being blended, within bounds."""

import time

import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub.vllm.scheduler.step_budget import Pace
from blendhub.vllm.scheduler.turns import LEAST_S, SPARE_STEPS, Turns

ENGINE = 100
"""What vLLM computes in a step."""
PACE = Pace(engine=ENGINE, beside=25, alone=100, full_steps=0)
LONG = ENGINE + 1


def request(number, priority=0):
    return Request(str(number), [1], SamplingParams(), None, arrival_time=float(number), priority=priority)


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.setattr("blendhub.vllm.scheduler.turns.LEAST_S", 0.0)
    return Turns(ENGINE)


def held_for(turns, later, n_tokens=LONG, begun=0):
    """How many steps a request waits."""
    for steps in range(100):
        if not turns.must_wait(later, n_tokens, begun):
            return steps
        turns.next_step()
    raise AssertionError("it waits for ever")


def test_without_others_nobody_waits(turns):
    assert held_for(turns, request(1)) == 0


def test_a_long_prompt_waits_until_an_earlier_request_is_loaded(turns):
    turns.begin(request(1), 100, PACE)
    assert turns.must_wait(request(2), LONG, 0)
    turns.end(request(1))
    assert not turns.must_wait(request(2), LONG, 0)


def test_an_earlier_request_does_not_wait(turns):
    turns.begin(request(2), 100, PACE)
    assert not turns.must_wait(request(1), LONG, 0)


def test_the_order_is_that_of_vllm_which_may_be_by_priority(turns):
    turns.begin(request(1, priority=1), 100, PACE)
    assert not turns.must_wait(request(2, priority=0), LONG, 0)
    assert turns.must_wait(request(2, priority=1), LONG, 0)


@pytest.mark.parametrize(("n_tokens", "begun", "waits"), [(100, 0, False), (60, 40, False), (60, 41, True)])
def test_a_prompt_that_vllm_computes_in_the_same_step_does_not_wait(turns, n_tokens, begun, waits):
    turns.begin(request(1), 100, PACE)
    assert turns.must_wait(request(2), n_tokens, begun) is waits


def test_nobody_waits_longer_than_recomputation_should_take(turns):
    """The hub, or the copy, may take any time."""
    turns.begin(request(1), 250, PACE)
    assert held_for(turns, request(2)) == 3 + SPARE_STEPS + 1


def test_steps_of_an_engine_that_has_nothing_else_to_do_are_not_counted():
    turns, begun = Turns(ENGINE), time.monotonic()
    turns.begin(request(1), 250, PACE)
    while turns.must_wait(request(2), LONG, 0):
        turns.next_step()
    assert time.monotonic() - begun >= LEAST_S


def test_requests_that_are_blended_together_take_as_long_as_all_of_them(turns):
    for number in range(4):
        turns.begin(request(number), 250, PACE)
    assert held_for(turns, request(9)) == 10 + SPARE_STEPS + 1


def test_recomputation_beside_prompts_that_vllm_has_begun_takes_longer(turns):
    turns.begin(request(1), 250, PACE._replace(full_steps=6))
    assert held_for(turns, request(2)) == 7 + SPARE_STEPS + 1
