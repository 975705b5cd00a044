"""Which tokens ask what they attend to, and what they may attend to."""

import numpy as np

from blendhub import Span
from blendhub.core.spans import Match
from blendhub.vllm.decision import Decision
from blendhub.vllm.model.attention_probe import counted_layers
from blendhub.vllm.worker.attention_query import attention_query
from tests.vllm.blending import load_job

MATCHES = (Match(Span(0, 30), 1, 0, True), Match(Span(30, 60), 2, 300, False), Match(Span(70, 90), 2, 500, False))


def asking(n_tokens, most, matches=MATCHES, start=5):
    decision = Decision(start, matches[-1].span.end, matches, 0.15)
    found = attention_query(load_job("r", np.zeros(n_tokens, np.uint32), (np.arange(8),), decision), most)
    return list(found.asking.spans), list(found.stored)


def test_layers_of_full_attention_are_asked_where_there_are_some():
    window, full = False, True
    assert counted_layers([0.5, 0.75], [full] * 8) == {4, 6}
    assert counted_layers([0.5, 0.75], [window, window, full] * 2) == {2, 5}
    assert counted_layers([0.5, 0.75], [window] * 8) == {4, 6}


def test_the_question_s_last_tokens_ask_all_that_is_stored_and_no_hole():
    assert asking(120, 16) == ([Span(104, 120)], [Span(0, 60), Span(70, 90)])
    assert asking(120, 64) == ([Span(90, 120)], [Span(0, 60), Span(70, 90)])


def test_without_a_question_the_last_tokens_ask_that_nothing_stored_covers():
    assert asking(91, 8) == ([Span(63, 70), Span(90, 91)], [Span(0, 60), Span(70, 90)])


def test_where_all_is_stored_the_prompt_s_last_tokens_ask_and_not_about_themselves():
    assert asking(61, 16, MATCHES[:2]) == ([Span(45, 61)], [Span(0, 45)])


def test_of_a_short_prompt_one_half_asks():
    assert asking(31, 64, (Match(Span(0, 30), 1, 300, False),), start=0) == ([Span(16, 31)], [Span(0, 16)])
