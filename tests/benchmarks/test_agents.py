"""The conversations of ``benchmarks.agents``: what an agent sends, and what its edits leave."""

from itertools import islice, pairwise

import pytest

from benchmarks.agents.client import computed_tokens
from benchmarks.agents.conversations import conversations
from benchmarks.agents.scripts import EDITS, EVERY, KEPT_RESULTS, SCRIPTS, documents
from benchmarks.quality.real.sources import BFCL
from benchmarks.quality.real.workloads import CLEARED

pytestmark = pytest.mark.skipif(not BFCL.exists(), reason="its texts are a package; `make setup` downloads it")
TURNS = 2 * EVERY + 3


@pytest.fixture(scope="module")
def conversation():
    return next(conversations("test", TURNS))


@pytest.fixture(params=[*SCRIPTS, "documents"])
def steps(request, conversation):
    return list(documents() if request.param == "documents" else SCRIPTS[request.param](conversation))


def test_a_step_is_edited_unless_it_goes_on_from_the_one_before(steps):
    assert any(step.is_edited for step in steps)
    for before, step in pairwise(steps):
        goes_on = step.messages[: len(before.messages)] == before.messages
        begins_anew = len(step.messages) <= 2 and not step.is_edited
        assert step.is_edited != goes_on or begins_anew


def test_every_edit_keeps_text_that_was_sent_before(steps):
    sent = list[str]()
    for step in steps:
        texts = [line for message in step.messages for line in message["content"].split("\n")]
        kept = sum(len(line) for line in texts if line in sent)
        assert not step.is_edited or kept > sum(map(len, texts)) / 2
        sent += texts


def test_cleared_results_stay_cleared_and_the_last_ones_stay(conversation):
    for step in SCRIPTS["clear"](conversation):
        results = [message["content"] for message in step.messages if message["role"] == "tool"]
        cleared = results.count(CLEARED)
        assert results[:cleared] == [CLEARED] * cleared
        assert len(results) - cleared < KEPT_RESULTS + EVERY


def test_ten_edits_follow_each_other(conversation):
    edited = [step for step in SCRIPTS["edits10"](conversation) if step.is_edited]
    assert [sum(message["content"] == CLEARED for message in step.messages) for step in edited] == [
        *range(1, EDITS + 1)
    ]


def test_reasoning_is_gone_when_the_user_speaks(conversation):
    for step in SCRIPTS["think"](conversation):
        reasoned = [number for number, one in enumerate(step.messages) if one["content"].startswith("<think>")]
        assert reasoned in ([], [len(step.messages) - 2])


def test_conversations_are_those_of_others(conversation):
    one, other = islice(conversations("test", TURNS), 2)
    assert one == conversation and not set(one.turns) & set(other.turns)
    assert not set(one.turns) & set(next(conversations("training", TURNS)).turns)


def test_kept_tokens_are_not_computed():
    spans = {"exact": [[10, 15]], "settled": [[5, 20]], "moved": [[30, 70]], "recomputed": [[30, 34], [40, 42]]}
    report = {"engine_tokens": 10, "spans": spans}
    assert computed_tokens(100, {"cached_tokens": 90}, report) == 46
    assert computed_tokens(100, {"cached_tokens": 90}, {}) == 10
    assert computed_tokens(100, {}, {"reason": "too short"}) == 100
