"""Which document stands before which."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.errors import InvalidInput
from blendhub.tools.analysis.lines import Place
from blendhub.tools.warm.documents import Document
from blendhub.tools.warm.neighbours import neighbours, paths


def documents(*texts: str) -> list[Document]:
    return [Document(Place("docs", number), text, name=str(number)) for number, text in enumerate(texts)]


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6), min_size=2, max_size=8))
def test_the_neighbour_is_the_earlier_one_that_shares_most_rare_words(texts):
    """Finds them by slow arithmetic: a word that n documents have until now counts 1/n."""
    words = [set(one) for one in texts]

    def shared(one: int, other: int) -> Fraction:
        numbers = [sum(word in each for each in words[: one + 1]) for word in words[one] & words[other]]
        return sum((Fraction(1, number) for number in numbers), Fraction())

    first, *others = neighbours(documents(*(" ".join(text) for text in texts)))
    assert first == 1
    for one, other in enumerate(others, 1):
        assert other is not None and other < one
        assert float(shared(one, other)) == pytest.approx(float(max(shared(one, each) for each in range(one))))


@given(st.lists(st.one_of(st.none(), st.integers(0, 11)), min_size=1, max_size=12), st.integers(1, 5))
def test_what_stands_before_a_document_was_computed_before_it(drawn, most):
    parents = [None if one is None or one >= len(drawn) or one == me else one for me, one in enumerate(drawn)]
    found = paths(parents, lambda path, one: len(path) <= most)
    for number, (path, parent) in enumerate(zip(found, parents, strict=True)):
        assert path[-1:] == ([] if parent is None else [parent])
        assert number not in path and len(set(path)) == len(path) <= most
        if len(path) > 1:
            assert path[:-1] == found[path[-1]], "the parent's own context begins this one"
        elif parent is not None and all(one is None or one < me for me, one in enumerate(parents)):
            assert len(found[parent]) in (0, most), "as much as fits stands before it"


@given(st.lists(st.text("ab ", max_size=8), min_size=3, max_size=9))
def test_documents_that_are_added_change_no_other(texts):
    assert neighbours(documents(*texts))[:-1] == neighbours(documents(*texts[:-1]))


def test_a_file_may_name_the_neighbour():
    first, second, third = documents("alpha beta", "alpha beta", "gamma")
    named = Document(first.place, first.text, name="0", neighbour="2")
    assert neighbours([named, second, third]) == [2, 0, 1]
    with pytest.raises(InvalidInput, match="docs:0: its neighbour 'x' is no document's id"):
        neighbours([Document(first.place, first.text, neighbour="x"), second])


def test_words_of_many_documents_do_not_count():
    common = " ".join(f"word{number}" for number in range(50))
    texts = [f"{common} own{number}" for number in range(100)]
    texts[80] += " rare"
    texts[90] += " rare"
    found = neighbours(documents(*texts))
    assert (found[80], found[90]) == (79, 80)


def test_the_only_document_has_none():
    assert neighbours(documents("alone")) == [None]
