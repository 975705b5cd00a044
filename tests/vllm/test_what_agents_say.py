"""What a request says to BlendHub about reuse and deletion, from its parameters to the hub."""

import time

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


def test_what_a_request_stored_can_be_deleted_by_its_id(engine):
    engine.serve_and_report("chatcmpl-one-1a2b3c4d", DOCUMENT)
    engine.serve_and_report("chatcmpl-two-1a2b3c4d", BEGINNING + DOCUMENT + QUESTION)
    gone = engine.client.forget(request="chatcmpl-one")
    assert gone.tokens == len(DOCUMENT)
    assert engine.found(DOCUMENT, exact=True) == set()
    assert engine.found(BEGINNING, exact=True) == set(range(len(BEGINNING))), "another request's stays"
    # What was moved into the other request's prompt, and blended, is that request's.
    assert engine.client.forget(request="chatcmpl-two").tokens > len(BEGINNING)
    assert engine.gauge("chunks") == 0


def test_the_hub_deletes_while_a_request_goes_on_and_takes_nothing_else(engine):
    engine.serve_and_report("chatcmpl-one-1a2b3c4d", DOCUMENT)
    request = engine.request("chatcmpl-two-1a2b3c4d", DOCUMENT + QUESTION)
    engine.side.arrived(request)
    there = engine.load(request)
    assert there == len(DOCUMENT)
    engine.step(**{request.request_id: (there, len(QUESTION))})
    engine.client.forget(request="chatcmpl-one")
    request.append_output_token_ids(1)
    engine.end(request, len(DOCUMENT + QUESTION))
    deadline = time.monotonic() + 10
    while not engine.client.forget(request="chatcmpl-two").tokens:
        assert time.monotonic() < deadline
    assert engine.gauge("chunks") == 0
