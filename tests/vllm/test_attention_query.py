"""Which tokens ask what they attend to, and what they may attend to."""

import numpy as np
import pytest

from blendhub import Span
from blendhub.core.spans import Match
from blendhub.vllm.decision import Decision
from blendhub.vllm.model.attention_probe import counted_layers
from blendhub.vllm.worker.attention_query import attention_query
from tests.vllm.blending import load_job

FOUND = Match(Span(0, 30), 1, 0, True), Match(Span(30, 60), 2, 300, False), Match(Span(70, 90), 2, 500, False)
STORED = [Span(0, 60), Span(70, 90)]


@pytest.mark.parametrize(
    "n_found, n_tokens, most, asking, stored",
    [
        (3, 120, 16, [Span(104, 120)], STORED),
        (3, 120, 64, [Span(90, 120)], STORED),
        (3, 91, 8, [Span(63, 70), Span(90, 91)], STORED),
        (2, 61, 16, [Span(45, 61)], [Span(0, 45)]),
        (1, 31, 64, [Span(16, 31)], [Span(0, 16)]),
    ],
    ids=["the question's last tokens", "all of the question", "no question", "all is stored", "half of a short prompt"],
)
def test_the_end_of_a_prompt_asks_what_is_stored_and_neither_holes_nor_itself(n_found, n_tokens, most, asking, stored):
    decision = Decision(5, FOUND[n_found - 1].span.end, FOUND[:n_found], 0.15)
    query = attention_query(load_job(np.zeros(n_tokens, np.uint32), decision), most)
    assert (query.asking.spans, query.stored) == (asking, stored)


def test_layers_of_full_attention_are_asked_where_there_are_some():
    window, full = False, True
    assert counted_layers([0.5, 0.75], [full] * 8) == counted_layers([0.5, 0.75], [window] * 8) == {4, 6}
    assert counted_layers([0.5, 0.75], [window, window, full] * 2) == {2, 5}
