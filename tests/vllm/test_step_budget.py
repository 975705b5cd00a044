"""How many tokens steps recompute, and how long prompts take by that, against a twin that counts steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from blendhub.vllm.scheduler.step_budget import Pace, StepBudget
from blendhub.vllm.settings import Settings

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
        ({"min_blend_share": 0.5}, 8000, 4096),
        ({"min_blend_share": 1e-9}, 8192, 1),
        ({"blend_tokens_per_step": 100}, 0, 100),
        ({"blend_tokens_per_step": 5000}, 8192, 2048),
    ],
)
def test_recomputation_has_a_share_of_every_step(settings, scheduled, budget):
    assert StepBudget(Settings(**settings), 8192).of_step(scheduled) == budget


def test_32_000_moved_tokens_are_blended_while_vllm_computes_other_prompts():
    """With 256 tokens a step they took 19 steps, in a queue that vLLM would have passed in 4."""
    pace = StepBudget(Settings(), 8192).pace(waiting=10**6)
    assert pace.steps_to_compute(32_000) == 4 > pace.steps_to_recompute(4_800) == 3


@given(st.integers(1, 10_000), st.integers(0, 10_000))
def test_an_engine_without_other_prompts_recomputes_no_slower_than_it_computes(n, share):
    pace = StepBudget(Settings(), 512).pace(waiting=0)
    assert pace.steps_to_recompute(min(n, share)) <= pace.steps_to_compute(n)
