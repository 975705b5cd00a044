"""The selectors that only the benchmark has: one that knows what to recompute, and chance."""

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.quality.oracle import OracleOptions, OracleSelector, dependent_runs, write_answers
from benchmarks.quality.plugin import RandomSelector
from benchmarks.quality.reader.task import make_prompt
from blendhub import Span
from blendhub.contracts import Selection

PROMPT = make_prompt(3, "test")
TOKENS = np.array([*PROMPT.header, *(token for one in PROMPT.documents for token in one), 1, 2, 3], np.uint32)
BEGIN, END = len(PROMPT.header), len(TOKENS) - 3
ALL = (Span(BEGIN, END),)
DEPENDENT = {place for start, end in dependent_runs(PROMPT) for place in range(start, end)}


@pytest.fixture
def oracle(tmp_path):
    file = tmp_path / "answers.json"
    write_answers([make_prompt(4, "test"), PROMPT], file)
    return OracleSelector(OracleOptions(str(file)))


def picked(oracle, ratio, moved=ALL, tokens=TOKENS):
    selection = Selection(moved=moved, ratio=ratio, tokens=tokens, question=Span(END, len(tokens)))
    return {place for span in oracle.select(selection) for place in range(span.start, span.end)}


def test_dependent_runs_are_what_the_task_says():
    begin = BEGIN
    expected = set()
    for document, dependent in zip(PROMPT.documents, PROMPT.dependent, strict=True):
        expected |= {begin + place for place in dependent}
        begin += len(document)
    assert expected == DEPENDENT


def test_it_picks_whole_facts_within_the_budget_and_first_of_all(oracle):
    budget = int(0.03 * (END - BEGIN)) + 1
    few = picked(oracle, 0.03)
    assert len(few) <= budget and few < DEPENDENT
    runs = [set(range(start, end)) for start, end in dependent_runs(PROMPT)]
    assert all(run <= few or not run & few for run in runs)
    assert picked(oracle, 0.15) > DEPENDENT


def test_a_larger_ratio_adds_to_what_a_smaller_one_picks(oracle):
    shares = [picked(oracle, ratio) for ratio in (0.0, 0.02, 0.05, 0.1, 0.5, 1.0)]
    assert not shares[0] and shares[-1] == set(range(BEGIN, END))
    assert all(less <= more for less, more in pairwise(shares))


def test_it_picks_nothing_that_did_not_move_and_knows_nothing_of_other_prompts(oracle):
    hole = Span(BEGIN + 40, BEGIN + 300)
    moved = (Span(BEGIN, hole.start), Span(hole.end, END))
    assert not picked(oracle, 0.5, moved) & set(range(hole.start, hole.end))
    assert not picked(oracle, 0.5, tokens=TOKENS[::-1].copy())


def test_without_a_file_it_knows_nothing():
    assert not picked(OracleSelector(OracleOptions()), 0.5)


def test_chance_picks_as_much_as_the_ratio_pays_for_everywhere():
    moved = [Span(0, 1000), Span(1200, 2200)]
    picks = [RandomSelector().select(Selection(moved, ratio, 16)) for ratio in (0.1, 0.5)]
    few, many = ({place for span in one for place in range(span.start, span.end)} for one in picks)
    assert len(few) == 200 and len(many) == 1000 and few <= many
    assert {place // 200 for place in many} == {0, 1, 2, 3, 4, 6, 7, 8, 9, 10}
