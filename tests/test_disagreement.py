"""Answers of different engines agree up to rounding, and no further: what end-to-end tests rely on."""

import math

import pytest

from harness.engines import Answer, disagreement

NUMBER = {"id": "", "report": {}, "transfer": {}, "cached": 0, "first_token_s": 0.0, "ended_s": 0.0}


def answer(*steps):
    """An answer with the likely tokens of each step, the most likely one first."""
    tokens = [next(iter(step)) for step in steps]
    return Answer(None, NUMBER | {"tokens": tokens, "logprobs": list(steps)})


SURE = {1: -0.1, 2: -3.0, 3: -4.0, 4: -5.0}
TIE = {5: -1.0, 6: -1.00001, 7: -4.0, 8: -5.0}
TURNED = {6: -1.0, 5: -1.00001, 7: -4.0, 8: -5.0}
AFTER_5, AFTER_6 = {1: -0.5, 2: -2.0}, {3: -0.7, 4: -2.5}


def test_equal_answers():
    assert disagreement([answer(SURE, TIE, AFTER_5)] * 2, [answer(SURE, TIE, AFTER_5)] * 2) == 0


def test_the_worst_step_of_the_worst_answer_counts():
    other = answer(SURE, TIE | {5: -0.8}, AFTER_5)
    same = answer(SURE, TIE, AFTER_5)
    assert disagreement([same, same], [same, other]) == pytest.approx(0.2)


def test_what_follows_two_tokens_that_are_almost_equally_likely_is_not_compared():
    given, expected = answer(SURE, TIE, AFTER_5), answer(SURE, TURNED, AFTER_6)
    assert disagreement([given], [expected]) == pytest.approx(1e-5)


def test_another_token_that_was_not_likely_disagrees():
    assert disagreement([answer(SURE)], [answer({2: -0.1, 1: -3.0, 3: -4.0, 4: -5.0})]) == pytest.approx(2.9)
    assert disagreement([answer(SURE)], [answer({9: -0.1, 8: -3.0, 7: -4.0, 6: -5.0})]) == math.inf


def test_which_of_the_less_likely_are_known_does_not_matter():
    known = {token: logprob for token, logprob in SURE.items() if token != 4} | {9: -5.0}
    assert disagreement([answer(SURE)], [answer(known)]) == 0


def test_answers_of_other_lengths_are_not_compared():
    with pytest.raises(ValueError):
        disagreement([answer(SURE, TIE)], [answer(SURE)])
    with pytest.raises(ValueError):
        disagreement([answer(SURE)], [])
