"""Prompts wait for earlier ones that are being blended, within bounds; how many tokens and steps blending takes."""

import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub.vllm.scheduler.blend_queue import LEAST_S, SPARE_STEPS, BlendQueue
from blendhub.vllm.scheduler.decide import Pace
from blendhub.vllm.settings import Settings

ENGINE = 100
"""What vLLM computes in a step."""
LONG = ENGINE + 1


def request(number, priority=0):
    return Request(str(number), [1], SamplingParams(), None, arrival_time=float(number), priority=priority)


@pytest.fixture
def queue(monkeypatch, begun):
    monkeypatch.setattr("blendhub.vllm.scheduler.blend_queue.LEAST_S", 0.0)
    return BlendQueue(SETTINGS, ENGINE, begun)


SETTINGS = Settings()


@pytest.fixture
def begun():
    """Prompts that vLLM has begun, by name."""
    return {}


def held_for(queue, later):
    """How many steps a request waits."""
    for steps in range(100):
        if not queue.must_wait(later, LONG):
            return steps
        queue.next_step()
    raise AssertionError("it waits for ever")


def test_who_comes_earlier_by_vllm_s_order_which_may_be_by_priority_does_not_wait(queue):
    queue.begin(request(1, priority=1), 100)
    assert not queue.must_wait(request(0, priority=1), LONG)
    assert not queue.must_wait(request(2, priority=0), LONG)
    assert queue.must_wait(request(2, priority=1), LONG)


@pytest.mark.parametrize("n_blended, n_computed, steps", [(1, 0, 3), (4, 0, 10), (1, 6 * ENGINE, 7)])
def test_nobody_waits_longer_than_recomputation_should_take(queue, begun, n_blended, n_computed, steps):
    """The bound counts all requests together and the prompts that vLLM has begun, but no wait for hub or copy."""
    begun["computed"] = SimpleNamespace(left_to_engine=n_computed)
    for number in range(n_blended):
        queue.begin(request(number), 250)
    assert held_for(queue, request(9)) == steps + SPARE_STEPS + 1


def test_steps_of_an_engine_that_has_nothing_else_to_do_are_not_counted():
    queue, started = BlendQueue(SETTINGS, ENGINE, {}), time.monotonic()
    queue.begin(request(1), 250)
    while queue.must_wait(request(2), LONG):
        queue.next_step()
    assert time.monotonic() - started >= LEAST_S


paces = st.builds(Pace, *[st.integers(1, 20)] * 3, st.integers(0, 9))


def steps(n_tokens, of_step):
    number = 0
    while n_tokens > 0:
        n_tokens -= of_step(number)
        number += 1
    return number


@given(paces, st.integers(0, 300))
def test_a_prompt_takes_as_many_steps_as_its_tokens_need(pace, n):
    assert pace.steps_to_compute(n) == steps(n, lambda number: pace.engine)
    assert pace.steps_to_recompute(n) == steps(
        n, lambda number: pace.beside if number < pace.full_steps else pace.alone
    )


@pytest.mark.parametrize(
    ("settings", "scheduled", "budget"),
    [
        ({}, 0, 8192),
        ({}, 1000, 7192),
        ({}, 8192, 2048),
        ({"blend_tokens_per_step": 100}, 0, 100),
        ({"blend_tokens_per_step": 5000}, 8192, 2048),
    ],
)
def test_recomputation_has_a_share_of_every_step(settings, scheduled, budget):
    assert BlendQueue(Settings(**settings), 8192, {}).budget(scheduled) == budget


@given(st.integers(1, 10_000), st.integers(0, 10_000))
def test_an_engine_without_other_prompts_recomputes_no_slower_than_it_computes(n, share):
    pace = BlendQueue(Settings(), 512, {}).pace()
    assert pace.steps_to_recompute(min(n, share)) <= pace.steps_to_compute(n)
