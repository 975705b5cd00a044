"""How far answers from blended KV are from exact ones: recomputation brings them closer, and audits measure it."""

import numpy as np
import pytest

from harness.engines import Engine, deviation, disagreement
from tests.vllm.conftest import PROBING, ROUNDING, SETTINGS, TOLERANCE, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMPARED = 4
"""The tokens of an answer that an audit compares."""


@pytest.fixture(scope="module")
def engine(model):
    """Its selector learns nothing from audits, unlike the default one."""
    with Engine(model, SETTINGS | PROBING | {"audit_tokens": COMPARED, "blend_tokens_per_step": 250}) as engine:
        yield engine


def test_the_more_is_recomputed_the_closer_and_what_deviates_before_all(engine, model, plain, texts):
    documents = [texts.new(200) for _ in range(5)]
    prompt = [token for document in reversed(documents) for token in [*texts.new(20), *document]]
    expected = plain.one(prompt).kv(len(prompt) - 1)

    def deviations(engine, *ratios):
        store(engine, [token for document in documents for token in document])
        for ratio in ratios:
            yield deviation(engine.one(prompt, recompute_ratio=ratio, store=False).kv(expected.shape[2]), expected)
            engine.forget()

    by_deviation = list(deviations(engine, 0.0, 0.05, 0.15, 0.5, 0.9, 1.0))
    assert by_deviation == sorted(by_deviation, reverse=True)
    assert by_deviation[-1] < ROUNDING < by_deviation[-2]
    with Engine(model, SETTINGS | {"selector": {"name": "first_k", "options": {"k": 0}}}) as by_place:
        less, more = deviations(by_place, 0.15, 0.5)
    assert by_deviation[2] < less and by_deviation[3] < more


def store_and_ask(engine, texts, number: int) -> list[list[int]]:
    """Have documents stored; returns prompts of them in another order."""
    first, second = texts.new(250), texts.new(250)
    store(engine, [*first, *second])
    return [[*second, *texts.new(20 + n), *first, *texts.new(5 + n)] for n in range(number)]


def common_beginning(blended, exact) -> int:
    """How many of the compared tokens come before the first difference."""
    same = [ours == theirs for ours, theirs in zip(blended.tokens[:COMPARED], exact.tokens[:COMPARED], strict=True)]
    return [*same, False].index(False)


def test_an_audited_request_is_answered_as_without_reuse_and_says_whether_blending_was_off(engine, plain, texts):
    assert engine.call("batches_in_flight") == 2
    prompts = store_and_ask(engine, texts, 5)
    prompts[0] = prompts[0][: len(prompts[0]) // 32 * 32 + 1]  # its last token is the first of a block
    expected = [plain.one(prompt, tokens=8) for prompt in prompts]
    asked = [{"recompute_ratio": ratio, "store": False} for ratio in (1.0, 0.1, 0.1, 0.1, 0.1)]
    unaudited = [engine.one(prompt, COMPARED, **said) for prompt, said in zip(prompts, asked, strict=True)]
    engine.forget()
    asked = [said | {"audit": True} for said in asked]
    alone = [engine.one(prompt, COMPARED, **said) for prompt, said in zip(prompts, asked, strict=True)]
    audits = [answer.report["audit"] for answer in alone]
    engine.forget()
    together = engine.ask(*prompts, tokens=8, each=asked)
    assert disagreement(together, expected) < TOLERANCE
    for answer, audit in zip(together, audits, strict=True):
        assert answer.report["moved_tokens"] > 400 and answer.report["recomputed_tokens"] > 0
        assert answer.report["audit"] == audit | {"kl": pytest.approx(audit["kl"], rel=1e-2, abs=1e-5)}
    kv = together[-1].kv(len(prompts[-1]) - 1)
    assert np.allclose(kv, engine.full_prefill(prompts[-1]), atol=1e-4)
    agreed = list(map(common_beginning, unaudited, expected))
    assert agreed[0] == COMPARED > min(agreed), "blending is never off here: nothing is tested"
    for answer, audit, tokens in zip(unaudited, audits, agreed, strict=True):
        assert "audit" not in answer.report
        assert (audit["tokens"], audit["agreed_tokens"]) == (COMPARED, tokens)
        assert audit["agrees"] == (tokens == COMPARED)


def test_others_are_blended_beside_an_audited_request_whose_kv_is_never_called_exact(engine, texts):
    prompts = store_and_ask(engine, texts, 3)
    asked = [{"audit": number == 1, "store": False} for number in range(3)]
    answers = engine.ask(*prompts, tokens=4, each=asked)
    assert ["audit" in answer.report for answer in answers] == [False, True, False]
    # What was audited is found again, though as settled, and never by requests that want no blended KV.
    again = engine.one(prompts[1], store=False)
    assert again.report["settled_tokens"] > 400 and again.report["moved_tokens"] < 64
    assert engine.one(prompts[1], store=False, mode="off").report["engine_tokens"] == 0
