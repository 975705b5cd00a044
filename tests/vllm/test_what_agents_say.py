"""What a request says to BlendHub about keeping and forgetting, from its parameters to the hub."""

import time

import pytest

from tests.vllm.played_engine import played_engine, text

DOCUMENT, BEGINNING, SECRET, QUESTION = text(0, 96), text(1, 96), text(2, 96), text(3, 96)


def test_in_strict_mode_nothing_that_was_computed_behind_removed_text_is_reused(engine):
    engine.serve_and_report("with the secret", BEGINNING + SECRET + DOCUMENT)
    edited = BEGINNING + DOCUMENT + QUESTION
    strict = engine.serve_and_report("strict", edited, forget="strict", store=False)
    assert (strict["exact_tokens"], strict["moved_tokens"], strict["settled_tokens"]) == (len(BEGINNING), 0, 0)
    assert strict["generation"] == 0
    fast = engine.serve_and_report("fast", edited)
    assert fast["moved_tokens"] >= len(DOCUMENT), "by default it is moved"
    # What the fast request has blended and stored is no KV for a strict one, not even behind the same whole text.
    again = engine.serve_and_report("strict again", edited, forget="strict", store=False)
    assert (again["exact_tokens"], again["moved_tokens"], again["settled_tokens"]) == (len(BEGINNING), 0, 0)


def test_what_a_strict_request_stores_is_exact(engine):
    engine.serve_and_report("with the secret", BEGINNING + SECRET + DOCUMENT)
    edited = BEGINNING + DOCUMENT
    engine.serve_and_report("strict", edited, forget="strict")
    assert engine.found(edited, exact=True) == set(range(len(edited)))


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"keep": 365 * 86_400}, "keep"),
        ({"keep": -1}, "keep"),
        ({"keep": 60, "drop": True}, "keep and drop"),
        ({"forget": "everything"}, "forget"),
        ({"forget": "strict", "mode": "blend"}, "exact prefixes only"),
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


def test_what_is_kept_outlives_other_kv_and_what_is_dropped_does_not():
    with played_engine(arena_gib=64 * 1024 / 2**30) as engine:
        n_chunks = int(engine.gauge("arena_free_bytes") // NAMESPACE_SLOT)
        engine.serve_and_report("kept", DOCUMENT, keep=600)
        engine.serve_and_report("dropped", BEGINNING, drop=True)
        for number in range(10, 10 + n_chunks // 3 + 2):
            engine.serve_and_report(f"other {number}", text(number, 96))
        assert engine.found(DOCUMENT, exact=True) == set(range(96))
        assert engine.found(BEGINNING, exact=True) == set()


NAMESPACE_SLOT = 32 * 2 * 4 * 4
"""The bytes of a chunk of the played engine's model."""


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
