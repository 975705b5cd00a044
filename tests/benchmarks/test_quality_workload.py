"""Which prompts are asked, and in which other prompts their documents are computed before."""

from collections import Counter
from itertools import islice, pairwise, repeat

import pytest

from benchmarks.quality.reader.task import STRATA
from benchmarks.quality.reader_cases import headers, make_prompts, make_text_cases
from benchmarks.quality.workload import HOLES, Case, make_visits

HEADER = [7, 7]


def case(number, documents):
    """Every token names its case and its document."""
    return Case(HEADER, [[1000 * number + 10 * n + k for k in range(5)] for n in range(documents)], [])


CASES = [case(number, documents) for number, documents in enumerate((4, 3, 5, 4, 4, 3, 5), 1)]


def documents_of(visit):
    """The document at each place of a visit: its case and its number."""
    tokens = visit[len(HEADER) :]
    assert visit[: len(HEADER)] == HEADER and len(tokens) % 5 == 0
    return [(first // 1000, first % 1000 // 10) for first in tokens[::5]]


@pytest.mark.parametrize("hole", [None, *HOLES])
def test_every_document_but_the_hole_is_computed_once_and_whole(hole):
    visits = make_visits(CASES, repeat(HEADER), 1000, hole)
    computed = Counter(document for visit in visits for document in documents_of(visit))
    assert set(computed.values()) == {1}
    for number, one in enumerate(CASES, 1):
        left_out = {hole: (number, one.hole(hole))} if hole else {}
        assert {n for home, n in computed if home == number} == set(range(len(one.documents))) - {
            n for _, n in left_out.values()
        }


def test_no_document_stands_beside_one_of_its_prompt():
    for visit in make_visits(CASES, repeat(HEADER), 1000):
        assert all(left[0] != right[0] for left, right in pairwise(documents_of(visit)))


def test_visits_are_no_longer_than_the_model_takes():
    visits = make_visits(CASES, repeat(HEADER), 12)
    assert max(map(len, visits)) == 12 and sum(len(documents_of(visit)) for visit in visits) == 28


def test_holes_are_at_the_begin_in_the_middle_and_at_the_end():
    assert [CASES[2].hole(which) for which in HOLES] == [0, 2, 4]
    assert CASES[2].stored_tokens() == 25 and CASES[2].stored_tokens("last") == 20


def test_prompts_of_the_reader_have_as_many_questions_of_each_stratum_and_end_with_a_block():
    made = list(make_prompts(3, 8))
    asked = Counter[int]()
    for prompt, one in made:
        assert len(one.body) % 8 == 0 and one.documents == prompt.documents
        for question in one.questions:
            right = next(q for q in prompt.questions if q.tokens == question.tokens)
            scores = question.score([right.answer])
            assert question.score([right.answer + 1])[STRATA.index(right.stratum)] == 0.0
            assert [number for number, score in enumerate(scores) if score is not None] == [STRATA.index(right.stratum)]
            assert sum(filter(None, scores)) == 1.0
            asked[STRATA.index(right.stratum)] += 1
    assert asked == dict.fromkeys(range(len(STRATA)), 3)


def test_headers_before_visits_are_of_no_prompt_that_is_asked():
    given = [tuple(header) for header in islice(headers(), 5)]
    assert len(set(given)) == 5
    assert not set(given) & {tuple(prompt.header) for prompt, _ in make_prompts(1, 8)}


def test_answers_of_the_reader_are_scored_as_text():
    (one,) = make_text_cases(1)
    (question,) = one.questions
    scores = [question.score([token]) for token in range(288)]
    assert sum(score == [1.0, 1.0] for score in scores) == 1 and scores.count([0.0, 0.0]) == 287
