"""More recomputation must come closer to full prefill, and choosing what to recompute must be worth it."""

import pytest

from harness.engines import Engine, deviation
from tests.vllm.conftest import PROBING, SETTINGS, Texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def deviations(engine, prompt, expected, ratios):
    found = []
    for ratio in ratios:
        engine.forget()
        blended = engine.one(prompt, recompute_ratio=ratio, store=False)
        found.append(deviation(blended.kv(expected.shape[2]), expected))
    return found


@pytest.fixture(scope="module")
def case(model, plain):
    """Documents to store, a prompt of them in another order, and its KV as it should be."""
    texts = Texts(7)
    documents = [texts.new(200) for _ in range(5)]
    stored = [token for document in documents for token in document]
    prompt = [token for document in reversed(documents) for token in [*texts.new(20), *document]]
    return stored, prompt, plain.one(prompt).kv(len(prompt) - 1)


def test_the_more_is_recomputed_the_closer(model, case):
    stored, prompt, expected = case
    with Engine(model, SETTINGS | PROBING) as engine:
        engine.one(stored)
        by_deviation = deviations(engine, prompt, expected, (0.0, 0.05, 0.15, 0.5, 0.9, 1.0))
    assert by_deviation == sorted(by_deviation, reverse=True)
    assert by_deviation[-1] < 1e-5 < by_deviation[-2]
    with Engine(model, SETTINGS | {"selector": {"name": "first_k", "options": {"k": 0}}}) as engine:
        engine.one(stored)
        by_place = deviations(engine, prompt, expected, (0.15, 0.5))
    assert by_deviation[2] < by_place[0] and by_deviation[3] < by_place[1]
