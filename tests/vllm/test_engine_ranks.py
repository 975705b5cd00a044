"""Tensor parallel: two ranks, each with half of the heads, that must do the same at the same time."""

import pytest

from blendhub.testing.engine import Engine
from tests.vllm.conftest import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RANKS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


def test_two_ranks_blend_as_one(model, plain, texts):
    first, second = texts.new(400), texts.new(400)
    prompts = [[*second, *texts.new(30 + n), *first, *texts.new(9)] for n in range(3)]
    expected = [plain.one(prompt, tokens=6) for prompt in prompts]
    with Engine(model, SETTINGS, **RANKS) as engine:
        engine.one([*first, *second])
        engine.forget()
        for ratio in (1.0, 0.3):
            answers = engine.ask(*prompts, tokens=6, recompute_ratio=ratio, store=False)
            assert all(answer.told["moved_tokens"] == 800 for answer in answers)
            assert all(answer.told["recomputed_tokens"] == 800 * ratio for answer in answers)
            engine.forget()
            if ratio == 1.0:
                for answer, other in zip(answers, expected, strict=True):
                    assert answer.tokens == other.tokens
                    assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-3)
