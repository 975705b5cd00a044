"""What a request says to BlendHub about reuse."""

import pytest

from tests.vllm.played_engine import text

DOCUMENT, BEGINNING, SECRET, QUESTION = text(0, 96), text(1, 96), text(2, 96), text(3, 96)


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"recompute_ratio": 2}, "recompute_ratio"),
        ({"mode": "blnd"}, "mode"),
    ],
)
def test_what_is_wrong_is_said_and_the_request_is_served_without_reuse(engine, asked, said):
    engine.serve_and_report("first", DOCUMENT)
    facts = engine.serve_and_report("wrong", BEGINNING + DOCUMENT, **asked)
    assert said in facts["reason"] and facts["moved_tokens"] == 0
    assert engine.found(BEGINNING, exact=True) == set(), "nothing of it is stored"
