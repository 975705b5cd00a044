"""The blocks of running requests: followed through what vLLM's scheduler says, or asked of vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from blendhub.vllm.scheduler.blocks.prefix_cache import RequestBlocks


def step(resumed=(), **blocks):
    """A step that schedules running requests; None: without further blocks."""
    groups = [None if given is None else (given,) for given in blocks.values()]
    cached = SimpleNamespace(req_ids=list(blocks), new_block_ids=groups, resumed_req_ids=set(resumed))
    return SimpleNamespace(scheduled_cached_reqs=cached)


@pytest.fixture
def followed():
    followed = RequestBlocks()
    followed.allocated("a", ([1, 2],))
    return followed


def test_further_blocks_follow_those_of_the_allocation(followed):
    followed.scheduled(step(a=[5], b=None))
    followed.scheduled(step(a=None))
    followed.scheduled(step(a=[3, 4]))
    assert followed.of("a") == [[1, 2, 5, 3, 4]]


def test_a_request_that_lost_its_blocks_has_only_the_new_ones(followed):
    followed.allocated("a", ([7],))
    assert followed.of("a") == [[7]]
    followed.scheduled(step(a=[7, 8], resumed=["a"]))
    assert followed.of("a") == [[7, 8]]


def test_what_vllm_gave_is_not_changed():
    given = [1]
    followed = RequestBlocks()
    followed.allocated("a", (given,))
    followed.scheduled(step(a=[2]))
    assert given == [1]


def test_an_ended_request_leaves_nothing(followed):
    followed.ended("a")
    followed.ended("never scheduled")
    with pytest.raises(KeyError):
        followed.of("a")


def test_a_vllm_that_can_be_asked_is_asked_each_time():
    known, asked = {"a": [1, 2]}, RequestBlocks()
    manager: Any = SimpleNamespace(get_block_ids=lambda request: (known[request],))
    asked.ask(manager)
    asked.allocated("a", ([7],))
    asked.scheduled(step(a=[8]))
    known["a"] = [1, 0, 5]  # vLLM took one back
    assert asked.of("a") == ([1, 0, 5],)
