"""The conversations of ``benchmarks.agents``: what an agent sends, and what its edits leave."""

from itertools import islice, pairwise

import pytest

from benchmarks.agents import EVERY, KEPT_RESULTS, clearing, computed_tokens, conversations, documents
from benchmarks.quality.sources import BFCL
from benchmarks.quality.workloads import CLEARED


@pytest.mark.parametrize("name", ["clearing", "documents"])
def test_an_edited_step_keeps_most_of_its_text_and_no_other_breaks_with_the_one_before(name):
    if not BFCL.exists():
        pytest.skip("its texts are a package; `make setup` downloads it")
    conversation, other = islice(conversations("test", 2 * EVERY + 3), 2)
    assert not set(conversation.turns) & set(other.turns)
    steps = list(documents() if name == "documents" else clearing(conversation))
    assert any(step.is_edited for step in steps)
    for before, step in pairwise(steps):
        goes_on = step.messages[: len(before.messages)] == before.messages
        begins_anew = len(step.messages) <= 2 and not step.is_edited
        assert step.is_edited != goes_on or begins_anew
    sent = list[str]()
    for step in steps:
        texts = [line for message in step.messages for line in message["content"].split("\n")]
        assert not step.is_edited or sum(len(line) for line in texts if line in sent) > sum(map(len, texts)) / 2
        sent += texts
    if name == "clearing":
        cleared = [[message["content"] == CLEARED for message in step.messages].count(True) for step in steps]
        assert cleared[EVERY] == EVERY - KEPT_RESULTS and cleared[-1] == 2 * EVERY - KEPT_RESULTS


def test_kept_tokens_are_not_computed():
    spans = {"exact": [[10, 15]], "settled": [[5, 20]], "moved": [[30, 70]], "recomputed": [[30, 34], [40, 42]]}
    assert computed_tokens(100, {"cached_tokens": 90}, {"engine_tokens": 10, "spans": spans}) == 46
    assert computed_tokens(100, {"cached_tokens": 90}, {}) == 10
