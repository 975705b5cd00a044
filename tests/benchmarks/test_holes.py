"""Which documents are holes and where they stand, what is computed before, what is reported, and what may be asked."""

import re
from pathlib import Path

import pytest

from benchmarks.holes.__main__ import parsed
from benchmarks.holes.figures import PHASES, Measured, Query, rows
from benchmarks.holes.order import before, make_prompts
from benchmarks.holes.passes import Way, query_of, ways_of
from benchmarks.holes.presets import OWN, PRESETS, PUBLISHED
from benchmarks.holes.reader_cases import make_cases
from benchmarks.quality.workload import Case, Question, Scores
from tests.stand_in import Anything

QUESTION = Question([9], lambda answer: Scores(float(answer == [5]), 0.5), ("five",))
DOCS = Path(__file__).parents[2] / "docs"


def case(number, documents=4):
    return Case([0], [[100 * number + n] for n in range(documents)], [QUESTION])


@pytest.mark.parametrize(
    "ids, positions, expected",
    [
        ([], [], [100, 101, 102, 103]),
        ([3], [0], [103, 100, 101, 102]),
        ([0], [3], [101, 102, 103, 100]),
        ([3, 1], [0, "middle"], [103, 100, 101, 102]),
        (["last"], ["first"], [103, 100, 101, 102]),
        (["middle"], ["last"], [100, 101, 103, 102]),
        ([0, 1], [1, 0], [101, 100, 102, 103]),
    ],
)
def test_holes_stand_where_they_are_asked_for_and_the_others_keep_their_order(ids, positions, expected):
    (prompt,) = prompts = make_prompts([case(1)], ids, positions)
    assert [tokens for (tokens,) in prompt.documents] == expected
    assert prompt.tokens == [0, *expected, 9]
    numbers = {{"middle": 2, "last": 3}.get(place, place) for place in ids}
    assert before(prompts) == [[0], *([token] for token in expected if token - 100 not in numbers)]


@pytest.mark.parametrize(
    "ids, positions, complaint",
    [
        ([1], [], "1 hole ids and 0 hole positions"),
        ([4], [0], "hole ids of query 0: 4 is out of range; there are 4 documents, so 0 to 3"),
        ([-2], [0], "hole ids of query 0: -2 is out of range"),
        ([0], [6], "hole positions of query 0: 6 is out of range; there are 6 documents, so 0 to 5"),
        ([1, 1], [0, 2], "hole ids of query 0: 1 1 name one of 4 documents twice"),
        ([0, 1], [3, "middle"], "hole positions of query 0: 3 middle name one of 6 documents twice"),
    ],
)
def test_holes_that_the_prompt_cannot_have_are_refused(ids, positions, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_prompts([case(1), case(2)], ids, positions, inflate=2)


def test_documents_of_other_queries_make_the_prompt_longer():
    cases = [case(1), case(2), case(3, 2)]

    def others(number, at):
        return [token for (token,) in make_prompts(cases, [], [], number)[at].documents[len(cases[at].documents) :]]

    assert others(4, 1) == [300, 100, 301, 101]
    assert others(3, 0) == [200, 300, 201]
    assert others(0, 0) == []
    with pytest.raises(ValueError, match=r"9 documents .* but query 0 finds 6 that are no holes; ask for fewer"):
        others(9, 0)
    (first, *_) = make_prompts(cases, [1], ["last"], 2)
    assert [token for (token,) in first.documents] == [100, 102, 103, 200, 300, 101]


def test_no_hole_of_any_query_is_computed_before():
    """Documents that were borrowed were holes of other queries, and phase 1 filled all of them."""
    prompts = make_prompts(make_cases(150), [0], [0], inflate=20)
    computed = {tuple(unit) for unit in before(prompts)}
    assert len(prompts) == 150 and all(len(prompt.documents) >= 28 for prompt in prompts)
    assert not any(prompt.missing & computed for prompt in prompts)
    # Two queries may have one document in common.
    twin = Case([0], [[7], [100]], [QUESTION])
    assert [100] not in before(make_prompts([case(1), twin], [0], [0]))


def test_the_header_is_computed_too_and_separators_stand_behind_every_part():
    prompts = make_prompts([case(1, 2), case(2, 2)], [1], [0], separator=[7, 7])
    assert prompts[0].tokens == [0, 7, 7, 101, 7, 7, 100, 7, 7, 9]
    assert before(prompts) == [[0, 7, 7], [100, 7, 7], [200, 7, 7]]


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
    way = Way(method, 0.3)
    assert way.asked() == expected | {"cache_salt": way.label}


def test_ratios_make_ways_of_their_own_where_they_matter():
    ways = ways_of(["full", "blend", "contiguous", "reuse"], [0.15, 0.3])
    assert [way.label for way in ways] == ["full", "blend_15", "blend_30", "contiguous_15", "contiguous_30", "reuse"]


class Told(Anything):
    def __init__(self, tokens, first_token_s, ended_s, **report):
        self.tokens, self.first_token_s, self.ended_s = tokens, first_token_s, ended_s
        zeros = ("engine_tokens", "exact_tokens", "moved_tokens", "recomputed_tokens", "hole_tokens")
        self.report = dict.fromkeys(zeros, 0) | report


def test_a_pass_reports_scores_shares_times_and_answers():
    prompts = make_prompts([case(1), case(2)], [], [])
    answers = [
        Told([5], 0.2, 0.2, exact_tokens=1, moved_tokens=3, recomputed_tokens=2, hole_tokens=1),
        Told([4, 4, 4], 0.4, 1.0, engine_tokens=1, reason="nothing is stored"),
    ]
    queries = [query_of(prompt, answer, str) for prompt, answer in zip(prompts, answers, strict=True)]
    found = Measured(queries, 1, {})
    assert (found.mean("f1"), found.mean("rouge_l")) == (0.5, 0.5)
    assert found.hit_rate == pytest.approx(5 / 12) and found.computed == pytest.approx(9 / 12)
    assert found.in_holes == pytest.approx(1 / 12)
    assert found.all("between_tokens_s") == pytest.approx([0.0, 0.3])
    assert found.all("ended_s") == [0.2, 1.0]
    assert [(one.answer, one.right) for one in queries] == [("[5]", ["five"]), ("[4, 4, 4]", ["five"])]
    with pytest.raises(SystemExit, match="without reuse: keys cannot be moved"):
        unused = Told([5], 0.2, 0.2)
        unused.report = {"reason": "keys cannot be moved"}
        query_of(prompts[0], unused, str)


def measured(f1, first_token_s=0.1, with_holes=3, **phases):
    queries = [Query(f1, 0, 10, 5, 1, 2, first_token_s * n, n, n / 10, "", []) for n in range(11)]
    return Measured(queries, with_holes, dict.fromkeys(PHASES, 0.0) | phases)


def test_times_are_held_against_full_prefill_and_phases_are_for_one_query():
    found = {"blend_15": [measured(0.2, load=5.5), measured(0.4)], "full": [measured(1.0, 0.2), measured(1.0, 0.4)]}
    made = {row.id: row.value for row in rows(found)}
    values = {"ttft_mean": 0.5, "ttft_p90": 0.9, "tbt_p90": 0.9, "e2e_p90": 9.0, "load": 0.5, "f1": 0.2}
    values |= {"with_holes": 3 / 11, "ttft_by_full": 0.5}
    assert {id: made[f"blend_15_pass_1_{id}"] for id in values} == pytest.approx(values)
    assert made["blend_15_pass_2_ttft_by_full"] == pytest.approx(0.25)
    assert "full_pass_1_ttft_by_full" not in made


def test_the_command_line_wins_over_the_preset():
    _, given = parsed(["--preset", "two_holes_r50", "--recompute-ratio", "0.25", "--until", "7"])
    assert (given.recompute_ratio, given.until) == ([0.25], 7)
    assert (given.hole_ids, given.hole_positions, given.separator) == ([2, 5], [4, 7], "# #")


@pytest.mark.parametrize(
    "said, complaint",
    [
        ("--inflate -1", "argument --inflate: expected a number of 0 or more, got '-1'"),
        ("--recompute-ratio 1.5", "argument --recompute-ratio: expected a number from 0 to 1, got '1.5'"),
        ("--hole-ids second", "argument --hole-ids: expected a number, or first, middle, last, got 'second'"),
    ],
)
def test_what_cannot_be_asked_is_refused(capsys, said, complaint):
    with pytest.raises(SystemExit):
        parsed(said.split())
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_options_that_can_be_asked(name):
    _, given = parsed(["--preset", name])
    assert all(getattr(given, option) == value for option, value in PRESETS[name].items())
    assert make_prompts(make_cases(30), given.hole_ids, given.hole_positions, given.inflate)


def test_every_preset_is_documented():
    assert re.findall(r"^\| `(\w+_r\d\d)` \|", (DOCS / "ascend.md").read_text(), re.M) == list(PUBLISHED)
    measurements = (DOCS / "measurements.md").read_text()
    assert all(f"--preset {name}" in measurements for name in OWN)
