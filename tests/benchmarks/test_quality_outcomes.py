"""What is won back."""

import pytest
from blendhub_tools.advice.outcomes import Comparison, Outcome, accuracy, won_back


def outcome(selector, ratio, *shares, cases=20):
    """An outcome with these shares of right answers, one a column; of ten questions in each case."""
    scores = [[10 * share for share in shares]] * cases
    return Outcome(selector, "", ratio, scores, [[10] * len(shares)] * cases, [ratio] * cases, [ratio] * cases)


FULL, REUSE = outcome("full", 1.0, 1.0, 1.0), outcome("reuse", 0.0, 0.98, 0.1)


def test_scores_are_means_over_questions_not_over_cases():
    uneven = Outcome("s", "", 0.1, [[1, 0], [0, 1]], [[1, 0], [3, 1]])
    assert accuracy(uneven).tolist() == [0.25, 1.0]


@pytest.mark.parametrize("ours, share", [(0.2, 0.0), (0.8, 1.0), (0.5, 0.5), (0.1, -1 / 6), (0.9, 7 / 6)])
def test_what_is_won_back_is_the_share_of_the_loss(ours, share):
    assert won_back(ours, 0.8, 0.2) == pytest.approx(share)


def test_where_reuse_loses_next_to_nothing_there_is_no_share():
    assert won_back(0.97, 0.98, 0.97) is None
    compared = Comparison(outcome("s", 0.1, 1.0, 1.0), FULL, REUSE)
    assert compared.share([0]) is None and compared.interval([0]) is None
    assert compared.share([1]) == pytest.approx(1.0)


def test_the_interval_widens_with_what_prompts_differ_in():
    same = Comparison(outcome("s", 0.1, 0.5, 0.5), FULL, REUSE)
    assert same.interval([1]) == pytest.approx((same.share([1]),) * 2)
    differing = outcome("s", 0.1, 0.5, 0.5)
    differing.scores = [[10 * (number % 2)] * 2 for number in range(20)]
    low, high = Comparison(differing, FULL, REUSE).interval([1])
    assert low < same.share([1]) - 0.1 and high > same.share([1]) + 0.1
