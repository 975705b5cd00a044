"""What is won back, and which bars it meets."""

import pytest

from benchmarks.quality.found import Found
from benchmarks.quality.report import page
from benchmarks.quality.rows import rows_of_reader, rows_of_texts
from blendhub.tools.advice.outcomes import Comparison, Outcome, accuracy, first, won_back

STRATA = ("plain", "local", "cross", "split", "chained", "alias", "counting")
FACTS = range(6)


def outcome(selector, state, ratio, right, cases=20):
    """An outcome with one share of right answers for all strata, or one for each; of ten questions in each case."""
    shares = right if isinstance(right, list) else [right] * len(STRATA)
    scores = [[10 * share for share in shares]] * cases
    return Outcome(selector, state, ratio, scores, [[10] * len(STRATA)] * cases, [ratio] * cases, [ratio] * cases)


FULL, REUSE = outcome("full", "", 1.0, 1.0), outcome("reuse", "", 0.0, [0.98, 0.9, 0.1, 0.1, 0.1, 0.1, 0.4])


def found(*others, default="ours"):
    return Found([FULL, REUSE, *others], STRATA, FACTS, "all but counting", default)


def test_scores_are_means_over_questions_not_over_cases():
    uneven = Outcome("s", "", 0.1, [[1, 0], [0, 1]], [[1, 0], [3, 1]])
    assert accuracy(uneven).tolist() == [0.25, 1.0]
    assert accuracy(first(uneven, 1)).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("ours, share", [(0.2, 0.0), (0.8, 1.0), (0.5, 0.5), (0.1, -1 / 6), (0.9, 7 / 6)])
def test_what_is_won_back_is_the_share_of_the_loss(ours, share):
    assert won_back(ours, 0.8, 0.2) == pytest.approx(share)


def test_where_reuse_loses_next_to_nothing_there_is_no_share():
    assert won_back(0.97, 0.98, 0.97) is None
    compared = Comparison(outcome("s", "", 0.1, 1.0), FULL, REUSE)
    assert compared.share([0]) is None and compared.interval([0]) is None
    assert compared.share([2]) == pytest.approx(1.0)


def test_the_interval_widens_with_what_prompts_differ_in():
    same = Comparison(outcome("s", "", 0.1, 0.5), FULL, REUSE)
    assert same.interval([2]) == pytest.approx((same.share([2]),) * 2)
    differing = outcome("s", "", 0.1, 0.5)
    differing.scores = [[10 * (number % 2)] * len(STRATA) for number in range(20)]
    low, high = Comparison(differing, FULL, REUSE).interval([2])
    assert low < same.share([2]) - 0.1 and high > same.share([2]) + 0.1


GOOD = [
    outcome("ours", "", 0.15, [0.98, 0.9, 0.95, 0.95, 0.95, 0.95, 0.6]),
    outcome("ours", "settled", 0.15, [0.98, 0.9, 0.7, 0.7, 0.7, 0.7, 0.5]),
    outcome("ours", "", 0.3, 1.0),
    outcome("first_k", "", 0.15, [0.98, 0.9, 0.3, 0.9, 0.3, 0.3, 0.6]),
    outcome("theirs", "", 0.3, 1.0),
    outcome("reuse", "hole first", 0.0, 0.2, cases=5),
    outcome("reuse", "hole last", 0.0, 0.3, cases=5),
    outcome("ours", "hole first", 0.15, 0.9, cases=5),
    outcome("ours", "hole last", 0.15, 0.86, cases=5),
]


def by_id(found, shipped=("ours", "first_k", "theirs")):
    return {row.id: row for row in rows_of_reader(found, shipped)}


def test_each_bar_is_met_by_what_is_good_enough():
    rows = by_id(found(*GOOD))
    bars = {id: row for id, row in rows.items() if row.bar is not None}
    assert [id for id, row in bars.items() if not row.ok] == ["plain_15"]
    assert rows["settled_15"].value < rows["recovered_15"].value < rows["recovered_30"].value
    assert rows["recovered_30"].value == pytest.approx(1.0)
    assert rows["plain_15"].value == pytest.approx(0.98) and not rows["plain_15"].ok
    assert rows["hole_15"].value == pytest.approx(0.8) and rows["hole_15"].spread == pytest.approx((0.8, 0.875))
    assert rows["default_wins"].value == pytest.approx(0.0)
    assert rows["counting_15"].value == pytest.approx(0.0)
    assert rows["first_k_15"].bar is None


@pytest.mark.parametrize(
    "id, worse",
    [
        ("counting_15", outcome("ours", "", 0.15, [1, 1, 1, 1, 1, 1, 0.59])),
        ("default_wins", outcome("ours", "", 0.3, 0.9)),
        ("hole_15", outcome("ours", "hole first", 0.15, 0.7, cases=5)),
    ],
)
def test_each_bar_is_missed_by_what_is_worse(id, worse):
    assert by_id(found(*GOOD))[id].ok
    assert not by_id(found(*(one for one in GOOD if one.key != worse.key), worse))[id].ok


def test_what_was_not_measured_has_no_value_and_meets_no_bar():
    rows = by_id(found())
    assert rows["recovered_15"].value is None and rows["recovered_15"].ok is None
    assert (
        rows["full_cross"].ok
        and rows["reuse_cross"].ok
        and not by_id(Found([FULL, outcome("reuse", "", 0.0, 0.6)], STRATA, FACTS, "mean", "ours"))["reuse_cross"].ok
    )


def test_the_page_has_a_row_for_each_outcome_of_a_ratio():
    text = page(found(*GOOD))
    at_15 = text.partition("## 15%")[2].partition("## 30%")[0].splitlines()
    names = [line.split("|")[1].strip() for line in at_15 if line.startswith("| ")]
    assert names[2:] == [
        "full prefill", "reuse", "ours", "ours settled", "first_k", "reuse hole first", "reuse hole last",
        "ours hole first", "ours hole last",
    ]  # fmt: skip
    assert "95.0 (94)" in text


def test_texts_have_rows_without_bars():
    columns = ("F1", "exact match")
    outcomes = [Outcome(name, "", ratio, [[score, 0]], [[1, 1]], [ratio], [0.1]) for name, ratio, score in
                (("full", 1.0, 0.5), ("reuse", 0.0, 0.3), ("hkvd", 0.15, 0.4))]  # fmt: skip
    rows = {row.id: row for row in rows_of_texts(Found(outcomes, columns, [0], "F1", "hkvd"))}
    assert rows["full_f1"].value == 0.5 and rows["reuse_exact_match"].value == 0
    assert rows["hkvd_15"].value == pytest.approx(0.5) and all(row.bar is None for row in rows.values())
