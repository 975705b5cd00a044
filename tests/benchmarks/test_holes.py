"""Which documents are holes and where they stand, and what a pass reports."""

import pytest

from benchmarks.holes import published
from benchmarks.holes.order import inflated, with_holes
from benchmarks.holes.passes import Measured, Procedure, measured_of, rows
from benchmarks.quality.measure import Answering
from benchmarks.quality.workload import Case, Question

QUESTION = Question([9], lambda answer: [float(answer == [5]), 0.5])


def case(number, documents=4):
    return Case([0], [[100 * number + n] for n in range(documents)], [QUESTION])


@pytest.mark.parametrize(
    "ids, positions, expected",
    [
        ([], [], [100, 101, 102, 103]),
        ([3], [0], [103, 100, 101, 102]),
        ([0], [3], [101, 102, 103, 100]),
        ([0], [-1], [101, 102, 100, 103]),
        ([3, 1], [0, -1], [103, 100, 101, 102]),
        ([0, 1], [1, 0], [101, 100, 102, 103]),
    ],
)
def test_holes_stand_where_they_are_asked_for_and_the_others_keep_their_order(ids, positions, expected):
    prompt = with_holes(case(1), [], ids, positions)
    assert [tokens for (tokens,) in prompt.documents] == expected
    assert prompt.tokens == [0, *expected, 9]
    assert [token for (token,) in prompt.known] == [token for token in expected if token - 100 not in ids]


@pytest.mark.parametrize(
    "ids, positions, complaint",
    [
        ([1], [], "1 hole ids and 0 hole positions"),
        ([4], [0], "hole id 4 is out of range: a prompt has 4 documents, so 0 to 3"),
        ([-1], [0], "hole id -1 is out of range"),
        ([0], [4], "hole position 4 is out of range: .* so -1 to 3"),
        ([0], [-2], "hole position -2 is out of range"),
        ([1, 1], [0, 2], "name one document twice"),
        ([0, 1], [2, -1], "name one place twice, of 4 documents"),
    ],
)
def test_holes_that_the_prompt_cannot_have_are_refused(ids, positions, complaint):
    with pytest.raises(ValueError, match=complaint):
        with_holes(case(1), [], ids, positions)


def test_documents_of_other_queries_make_the_prompt_longer():
    cases = [case(1), case(2), case(3, 2)]
    assert inflated(cases, 4, 1) == [[300], [100], [301], [101]]
    assert inflated(cases, 3, 0) == [[200], [300], [201]]
    assert inflated(cases, 0, 0) == []
    prompt = with_holes(cases[0], inflated(cases, 2, 0), [5], [0])
    assert [token for (token,) in prompt.documents] == [300, 100, 101, 102, 103, 200]
    with pytest.raises(ValueError, match="9 documents of other queries were asked for, but query 0 finds 5"):
        inflated(cases, 9, 0)


@pytest.mark.parametrize(
    "method, expected",
    [
        ("blend", {"mode": "blend", "recompute_ratio": 0.3, "settled": False}),
        ("reuse", {"mode": "blend", "recompute_ratio": 0.0, "settled": False}),
        ("contiguous", {"mode": "contiguous", "recompute_ratio": 0.3, "settled": False}),
        ("full", {"mode": "off", "store": False}),
    ],
)
def test_each_method_is_a_way_to_ask(method, expected):
    assert Procedure(method, 0.3, "all", Answering()).asked("salt") == expected | {"cache_salt": "salt"}


class Told:
    def __init__(self, tokens, first_token_s, ended_s, **report):
        self.tokens, self.first_token_s, self.ended_s = tokens, first_token_s, ended_s
        zeros = ("engine_tokens", "exact_tokens", "moved_tokens", "recomputed_tokens")
        self.report = dict.fromkeys(zeros, 0) | report


def test_a_pass_reports_scores_shares_and_times():
    prompts = [with_holes(case(number), [], [], []) for number in (1, 2)]
    answers = [
        Told([5], 0.2, 0.2, exact_tokens=1, moved_tokens=3, recomputed_tokens=2),
        Told([4, 4, 4], 0.4, 1.0, engine_tokens=1, reason="nothing is stored"),
    ]
    found = measured_of(prompts, answers, {"lookup": 0.1})
    assert (found.f1, found.rouge_l) == (0.5, 0.5)
    assert found.hit_rate == pytest.approx(5 / 12) and found.computed == pytest.approx(9 / 12)
    assert found.between_tokens_s == pytest.approx([0.0, 0.3])
    assert found.ended_s == [0.2, 1.0]


def test_rows_are_medians_of_repetitions_and_phases_are_for_one_query():
    phases = dict.fromkeys(("lookup", "load", "probe", "recompute", "save"), 0.0)
    first, second = (Measured(f1, 0, 0, 0, [0.1 * n for n in range(11)], [0.0], [1.0], phases | {"load": 3.0})
                     for f1 in (0.2, 0.4))  # fmt: skip
    made = {row.id: row for row in rows([[first, second], [second, second]], 6)}
    assert made["pass_1_f1"].value == pytest.approx(0.3) and made["pass_1_f1"].spread == (0.2, 0.4)
    assert made["pass_2_f1"].value == 0.4
    assert made["pass_1_ttft_p90"].value == pytest.approx(0.9) and made["pass_1_ttft_mean"].value == pytest.approx(0.5)
    assert made["pass_2_load"].value == 0.5


def test_published_figures_stand_beside_ours_without_a_bar():
    made = published.rows()
    assert {row.spread for row in made if row.id.endswith("f1_0_holes_50")} == {(0.352, 0.366)}
    assert all(row.bar is None and row.spread[0] <= row.value <= row.spread[1] for row in made)
