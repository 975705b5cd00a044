"""Which prompts are asked, and in which other prompts their documents are computed before."""

from collections import Counter
from itertools import pairwise, repeat

from benchmarks.quality.workload import Case, make_visits

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


def test_every_document_is_computed_once_and_whole():
    visits = make_visits(CASES, repeat(HEADER), 1000)
    computed = Counter(document for visit in visits for document in documents_of(visit))
    assert set(computed.values()) == {1}
    assert set(computed) == {(number, n) for number, one in enumerate(CASES, 1) for n in range(len(one.documents))}


def test_no_document_stands_beside_one_of_its_prompt():
    for visit in make_visits(CASES, repeat(HEADER), 1000):
        assert all(left[0] != right[0] for left, right in pairwise(documents_of(visit)))


def test_visits_are_no_longer_than_the_model_takes():
    visits = make_visits(CASES, repeat(HEADER), 12)
    assert max(map(len, visits)) == 12 and sum(len(documents_of(visit)) for visit in visits) == 28
