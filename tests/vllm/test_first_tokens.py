"""How long requests wait for their first tokens, and what they reuse."""

from vllm import SamplingParams
from vllm.v1.request import Request

from blendhub.core.layout import Variant
from blendhub.vllm.scheduler.admission import Terms
from blendhub.vllm.scheduler.first_tokens import FirstTokens
from blendhub.vllm.scheduler.request_state import RequestState


def test_each_request_is_timed_once_from_its_arrival_to_the_step_that_sampled_its_first_token():
    now, seen = 100.0, []
    tokens = FirstTokens(lambda reuse, seconds: seen.append((reuse, seconds)), lambda: now)
    first, second, aborted = (
        RequestState(
            Request(name, [1, 2], SamplingParams(max_tokens=9), None, arrival_time=arrival),
            Terms(Variant(), "off", 0.0, stores=False),
        )
        for name, arrival in (("a", 99.0), ("b", 98.0), ("c", 97.0))
    )
    for state in (first, second, aborted):
        tokens.begin(state)
    tokens.look()
    assert seen == []
    now = 101.0
    first.request.append_output_token_ids(5)
    tokens.look()
    assert seen == [("none", 2.0)]
    now = 103.0
    second.request.append_output_token_ids(5)
    tokens.end(second)  # it had only one
    tokens.end(aborted)
    tokens.begin(first)  # it was preempted
    tokens.look()
    assert seen == [("none", 2.0), ("none", 5.0)]
