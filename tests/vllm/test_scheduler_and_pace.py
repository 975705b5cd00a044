"""What recomputation has of a step, and how long others wait for it."""

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub.vllm.scheduler.blend_queue import SPARE_STEPS, BlendQueue
from blendhub.vllm.scheduler.request.served_request import Requests

ENGINE = 100
"""What vLLM computes in a step."""
LONG = ENGINE + 1


def request(number, priority=0):
    return Request(str(number), [1], SamplingParams(), None, arrival_time=float(number), priority=priority)


@pytest.mark.parametrize("n_blended, steps", [(1, 10), (4, 40)])
def test_nobody_waits_longer_than_recomputation_takes_beside_others(monkeypatch, n_blended, steps):
    """The bound counts all requests together, but no wait for hub or copy: 25 tokens in each step."""
    monkeypatch.setattr("blendhub.vllm.scheduler.blend_queue.MIN_WAIT_S", 0.0)
    queue = BlendQueue(ENGINE, Requests())
    for number in range(n_blended):
        queue.begin(request(number, priority=1), 250)
    # In vLLM's order, which may be by priority.
    assert not queue.must_wait(request(9, priority=0), LONG) and queue.must_wait(request(9, priority=1), LONG)
    held = 0
    while queue.must_wait(request(9, priority=1), LONG):
        queue.next_step()
        held += 1
    assert held == steps + SPARE_STEPS + 1


@pytest.mark.parametrize(("scheduled", "budget"), [(0, 8192), (1000, 7192), (8192, 2048)])
def test_recomputation_has_a_share_of_every_step(scheduled, budget):
    assert BlendQueue(8192, Requests()).budget(scheduled) == budget
