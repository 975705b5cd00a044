"""Whose KV real vLLM moves: none that was computed with little text before it, and none of a stranger."""

import pytest

from harness.engines import Engine
from tests.vllm.conftest import SETTINGS, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONTEXT = 64
"""KV with fewer tokens before it stays."""


@pytest.fixture(scope="module")
def engine(model):
    settings = SETTINGS | {"donors": "trusted", "policy": SETTINGS["policy"] | {"min_donor_context": CONTEXT}}
    with Engine(model, settings, max_model_len=2048) as engine:
        yield engine


def test_only_the_kv_of_trusted_requests_moves(engine, texts):
    document = texts.new(300)
    stranger_s = [*texts.new(70), *document]
    elsewhere = [*texts.new(80), *document, *texts.new(9)]
    store(engine, stranger_s)
    report = engine.one(elsewhere, store=False).report
    assert report["moved_tokens"] == 0 and report["reason"].startswith("300 tokens are not moved: it is stored only of")
    engine.forget()
    again = engine.one([*stranger_s, *texts.new(9)], store=False).report
    assert again["exact_tokens"] == len(stranger_s), "it is a prefix like any other"
    engine.forget()
    again = engine.one([*stranger_s, *texts.new(9)], donate=True).report
    assert again["exact_tokens"] == len(stranger_s), "the stranger's copy, which does not keep it from being a donor"
    engine.forget()
    assert engine.one(elsewhere, store=False).report["moved_tokens"] == 300


def test_what_a_stranger_computes_behind_moved_text_does_not_move(engine, texts):
    document, added = texts.new(200), texts.new(200)
    engine.one([*texts.new(70), *document], donate=True)
    engine.forget()
    prompt = [*texts.new(100), *document, *added]
    assert engine.one(prompt, tokens=40).report["moved_tokens"] == 200
    engine.forget()
    report = engine.one([*texts.new(80), *document, *texts.new(70), *added, *texts.new(9)]).report
    assert report["moved_tokens"] == 200 and report["settled_tokens"] == 0


def test_a_text_that_was_computed_first_is_computed_once_more_and_moves_from_there(engine, texts):
    document = texts.new(300)
    engine.one(document, donate=True)
    engine.forget()
    prompt = [*texts.new(70), *document, *texts.new(9)]
    report = engine.one(prompt, donate=True, explain=True).report
    # What stood deeper than 64 tokens moves; the beginning of the document is a hole.
    assert report["moved_tokens"] == 300 - CONTEXT and report["spans"]["holes"] == [[0, 70 + CONTEXT]]
    engine.forget()
    report = engine.one([*texts.new(80), *document, *texts.new(9)], store=False).report
    assert report["moved_tokens"] == 300
