"""Audits in a real engine: the answer is the exact one, and the outcome is what two engines would have found."""

import numpy as np
import pytest

from harness.engines import Engine, disagreement
from tests.vllm.conftest import ON_THE_SECOND_RUNNER, PROBING, SETTINGS, TOLERANCE
from tests.vllm.test_engine_ranks import FORKED, environment  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPARED = 4
ALL = SETTINGS | {"audit_share": 1.0, "audit_tokens": COMPARED}


def case(texts, number: int) -> tuple[list[int], list[list[int]]]:
    """Documents to store, and prompts of them in another order."""
    first, second = texts.new(250), texts.new(250)
    return [*first, *second], [[*second, *texts.new(20 + n), *first, *texts.new(5 + n)] for n in range(number)]


def common_beginning(blended, exact) -> int:
    """How many of the compared tokens come before the first difference."""
    same = [ours == theirs for ours, theirs in zip(blended.tokens[:COMPARED], exact.tokens[:COMPARED], strict=True)]
    return [*same, False].index(False)


def test_an_audited_request_is_answered_as_without_reuse_and_says_whether_blending_was_off(model, plain, texts):
    stored, prompts = case(texts, 5)
    prompts[0] = prompts[0][: len(prompts[0]) // 32 * 32 + 1]  # its last token is the first of a block
    expected = [plain.one(prompt, tokens=8) for prompt in prompts]
    asked = [{"recompute_ratio": ratio, "store": False} for ratio in (1.0, 0.1, 0.1, 0.1, 0.1)]
    # The default selector learns from audits: it would pick other tokens the second time.
    with Engine(model, ALL | PROBING) as engine:
        assert engine.call("batches_in_flight") == 2
        engine.one(stored)
        engine.forget()
        blended = [engine.one(prompt, COMPARED, **one) for prompt, one in zip(prompts, asked, strict=True)]
        outcomes = [answer.report["audit"] for answer in blended]
        engine.forget()
        audited = engine.ask(*prompts, tokens=8, each=asked)
        assert disagreement(audited, expected) < TOLERANCE
        for answer, outcome in zip(audited, outcomes, strict=True):
            assert answer.report["moved_tokens"] > 400 and answer.report["recomputed_tokens"] > 0
            assert answer.report["audit"] == outcome | {"kl": pytest.approx(outcome["kl"], rel=1e-2, abs=1e-5)}
        kv = audited[-1].kv(len(prompts[-1]) - 1)
        assert np.allclose(kv, engine.full_prefill(prompts[-1]), atol=1e-4)
    with Engine(model, SETTINGS | PROBING | {"audit_share": 0}) as engine:
        engine.one(stored)
        engine.forget()
        unaudited = [engine.one(prompt, COMPARED, **one) for prompt, one in zip(prompts, asked, strict=True)]
    agreed = list(map(common_beginning, unaudited, expected))
    assert agreed[0] == COMPARED > min(agreed), "blending is never off here: nothing is tested"
    for answer, outcome, tokens in zip(unaudited, outcomes, agreed, strict=True):
        assert "audit" not in answer.report
        assert (outcome["tokens"], outcome["agreed_tokens"]) == (COMPARED, tokens)
        assert outcome["agrees"] == (tokens == COMPARED)


def test_a_request_asks_for_its_audit_and_others_are_blended_beside_it(model, texts):
    stored, prompts = case(texts, 3)
    settings = SETTINGS | {"audit_share": 0, "blend_tokens_per_step": 100}
    with Engine(model, settings, async_scheduling=False) as engine:
        engine.one(stored)
        engine.forget()
        asked = [{"audit": number == 1, "store": False} for number in range(3)]
        answers = engine.ask(*prompts, tokens=4, each=asked)
        assert ["audit" in answer.report for answer in answers] == [False, True, False]
        # What was audited is found again, though as settled, and never by requests that want no blended KV.
        again = engine.one(prompts[1], store=False)
        assert again.report["settled_tokens"] > 400 and again.report["moved_tokens"] < 64
        assert engine.one(prompts[1], store=False, mode="off").report["engine_tokens"] == 0


@pytest.mark.long
def test_audits_work_in_the_second_runner(model, plain, texts):
    stored, prompts = case(texts, 2)
    expected = [plain.one(prompt, tokens=6) for prompt in prompts]
    with Engine(model, ALL, **ON_THE_SECOND_RUNNER) as engine:
        engine.one(stored)
        engine.forget()
        answers = engine.ask(*prompts, tokens=6, store=False)
        assert disagreement(answers, expected) < TOLERANCE
        assert all(answer.report["audit"]["kl"] > 0 for answer in answers)
        assert all(answer.report["audit"]["tokens"] == COMPARED for answer in answers)


def test_two_ranks_audit_as_one(model, plain, environment, texts):  # noqa: F811
    stored, prompts = case(texts, 3)
    expected = [plain.one(prompt, tokens=6) for prompt in prompts]
    # One that computes no scores, which rounding would make different.
    settings = ALL | {"selector": {"name": "first_k"}}
    with Engine(model, settings) as engine:
        engine.one(stored)
        engine.forget()
        alone = [engine.one(prompt, COMPARED, store=False).report["audit"] for prompt in prompts]
    with Engine(model, settings, variables=environment, **FORKED) as engine:
        engine.one(stored)
        engine.forget()
        answers = engine.ask(*prompts, tokens=6, store=False)
        assert disagreement(answers, expected) < TOLERANCE
        for answer, outcome in zip(answers, alone, strict=True):
            assert answer.report["audit"] == outcome | {"kl": pytest.approx(outcome["kl"], rel=1e-2, abs=1e-5)}
