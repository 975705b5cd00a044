"""How far blended KV is from exact KV: recomputation brings it closer."""

import pytest

from harness.engines import Engine, deviation
from tests.vllm.conftest import PROBING, ROUNDING, SETTINGS, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS | PROBING) as engine:
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
