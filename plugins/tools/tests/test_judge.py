"""How far answers are from full prefill's, and what is won back of what reuse loses."""

import math
import random
from types import SimpleNamespace

import pytest
from blendhub_tools.advice.judge import ANSWER, FIRST, KL, NATS, RIGHT, SURE_FIRST, divergence, judge
from blendhub_tools.advice.outcomes import Comparison, Outcome, accuracy, won_back


def distribution(rng, tokens):
    weights = [rng.random() ** 8 for _ in range(tokens)]
    return {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


def test_divergence_is_that_of_the_whole_distributions_where_all_tokens_are_known_and_less_where_not():
    rng = random.Random(0)
    for _ in range(50):
        full, ours = distribution(rng, 30), distribution(rng, 30)
        whole = sum(math.exp(p) * (p - ours[token]) for token, p in full.items())
        assert divergence(full, ours) == pytest.approx(whole)
        likely = [dict(sorted(one.items(), key=lambda item: -item[1])[:10]) for one in (full, ours)]
        assert -1e-9 <= divergence(*likely) <= whole + 1e-9


def said(tokens, *chances):
    """An answer of these tokens, and at each the chances of tokens."""
    logprobs = [{token: math.log(p) for token, p in likely.items()} for likely in chances]
    return SimpleNamespace(tokens=tokens, logprobs=logprobs)


def test_an_answer_is_compared_at_each_token_of_full_prefill():
    full = said([1, 2], {1: 0.8, 2: 0.2}, {1: 0.4, 2: 0.6})
    ours = said([1, 2], {1: 0.4, 2: 0.6}, {1: 0.4, 2: 0.6})
    scores = judge(full, ours, 1)
    assert scores[KL] == pytest.approx(-0.8 * math.log(2) - 0.2 * math.log(0.2 / 0.6))
    assert scores[NATS] == pytest.approx(-math.log(2))
    assert scores[FIRST] == scores[SURE_FIRST] == scores[ANSWER] == scores[RIGHT] == 0
    assert judge(full, full, 2)[FIRST:] == [1, 1, 1, 1] and judge(full, ours, 0)[RIGHT] is None


def test_what_is_won_back_is_the_share_of_the_loss_and_its_interval_widens_with_what_prompts_differ_in():
    assert [won_back(ours, 0.8, 0.2) for ours in (0.2, 0.8, 0.1)] == pytest.approx([0.0, 1.0, -1 / 6])
    assert won_back(0.97, 0.98, 0.97) is None, "reuse loses next to nothing"

    def outcome(*scores):
        return Outcome("s", "", 0.1, [[score] for score in scores], [[10]] * len(scores))

    full, reuse = outcome(*[10] * 20), outcome(*[1] * 20)
    same, differing = (Comparison(ours, full, reuse) for ours in (outcome(*[5] * 20), outcome(*[0, 10] * 10)))
    assert same.interval([0]) == pytest.approx((same.share([0]),) * 2)
    low, high = differing.interval([0])
    assert low < same.share([0]) - 0.1 and high > same.share([0]) + 0.1
    uneven = Outcome("s", "", 0.1, [[1, 0], [0, 1]], [[1, 0], [3, 1]])
    assert accuracy(uneven).tolist() == [0.25, 1.0], "means over questions, not over cases"
