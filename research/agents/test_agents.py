"""The conversations of ``research.agents``: what an agent sends, and what its edits leave."""

from itertools import islice, pairwise

import pytest

from benchmarks.quality.sources import BFCL
from benchmarks.quality.workloads import CLEARED
from research.agents.__main__ import Reply, computed_tokens
from research.agents.conversations import EVERY, KEPT_RESULTS, clearing, conversations


def test_an_edited_step_keeps_most_of_its_text_and_no_other_breaks_with_the_one_before():
    if not BFCL.exists():
        pytest.skip("its texts are a package; `make setup` downloads it")
    conversation, other = islice(conversations(2 * EVERY + 3), 2)
    assert not set(conversation.turns) & set(other.turns)
    steps = list(clearing(conversation))
    assert all(step.is_edited == (number > 0 and number % EVERY == 0) for number, step in enumerate(steps))
    sent = set[str]()
    for before, step in pairwise(steps):
        assert step.is_edited != (step.messages[: len(before.messages)] == before.messages)
        sent |= {message["content"] for message in before.messages}
        texts = [message["content"] for message in step.messages]
        assert sum(len(text) for text in texts if text in sent) > sum(map(len, texts)) / 2
    cleared = [[message["content"] == CLEARED for message in step.messages].count(True) for step in steps]
    assert cleared[EVERY] == EVERY - KEPT_RESULTS and cleared[-1] == 2 * EVERY - KEPT_RESULTS


def test_kept_tokens_are_not_computed():
    spans = {"exact": [[10, 15]], "settled": [[5, 20]], "moved": [[30, 70]], "recomputed": [[30, 34], [40, 42]]}
    assert computed_tokens(Reply(0.1, 100, 90, {"engine_tokens": 10, "spans": spans})) == 46
    assert computed_tokens(Reply(0.1, 100, 90, {})) == 10
