"""What a selector sees of a prompt inside of vLLM decides which of its tokens are computed again."""

import numpy as np
import pytest

from blendhub import PluginHost, Span
from blendhub.contracts import Selection
from harness.engines import Engine
from tests.vllm.conftest import SETTINGS
from tests.vllm.test_engine_sensitivity import known

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LEARNED = {"name": "combined", "options": {"question_share": 0}}


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, SETTINGS) as engine:
        yield engine


def test_the_places_that_the_question_asks_for_are_computed_again(engine, texts):
    document = texts.new(200)
    engine.one([*texts.new(11), *document, *texts.new(5)])
    engine.forget()
    for place in (60, 150):
        question = [*document[place : place + 2], *texts.new(3)]
        prompt = [*texts.new(100), *document, *question]
        answer = engine.one(prompt, recompute_ratio=0.15, store=False, explain=True)
        assert answer.report["spans"]["moved"] == [[100, 300]]
        assert 22 <= answer.report["recomputed_tokens"] <= 30
        picked = {at for start, end in answer.report["spans"]["recomputed"] for at in range(start, end)}
        assert picked >= {*range(100, 104), *range(100 + place, 107 + place)}


def test_what_one_request_learned_decides_what_the_next_one_has_recomputed(model, texts):
    document, front, question = texts.new(300), texts.new(60), texts.new(9)
    first, second = [*texts.new(100), *document, *texts.new(9)], [*front, *document, *question]
    with Engine(model, SETTINGS | {"selector": LEARNED}) as engine:
        engine.one(document)
        engine.forget()
        assert engine.one(first, recompute_ratio=1.0, store=False).report["recomputed_tokens"] == 300
        sensitivity = known(engine, second, 300)
        engine.forget()
        answer = engine.one(second, recompute_ratio=0.15, store=False, explain=True)
    asked = Selection(
        [Span(60, 360)],
        0.15,
        holes=[Span(0, 60)],
        question=Span(360, 369),
        tokens=np.array(second, np.uint32),
        sensitivity=sensitivity,
    )
    selector = PluginHost.discover().create("selector", *LEARNED.values())
    assert [Span(*span) for span in answer.report["spans"]["recomputed"]] == selector.select(asked)
    place_alone = selector.select(Selection([Span(60, 360)], 0.15, holes=[Span(0, 60)]))
    assert selector.select(asked) != place_alone
