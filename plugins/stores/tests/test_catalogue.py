"""The arithmetic of what goes when room is needed, against a twin that tries one discard after another."""

import copy
from typing import TypeAlias

import pytest
from blendhub_stores.catalogue import Catalogue, Entry
from hypothesis import given
from hypothesis import strategies as st

from blendhub.contracts import RunKey
from blendhub.core.errors import StoreFailed
from blendhub.core.spans import Span

KEYS = [RunKey("n", name) for name in "abc"]
SPANS = [Span(0, 1), Span(1, 2), Span(2, 3)]
Call: TypeAlias = tuple[RunKey, Span | None, int, bool]
calls = st.tuples(
    st.sampled_from(KEYS),
    st.sampled_from([None, *SPANS]),
    st.integers(1, 9),
    st.sampled_from([False, False, False, True]),
)


def play(catalogue: Catalogue, history: list[Call]) -> None:
    for key, span, nbytes, discarding in history:
        if discarding:
            catalogue.discard((key, span))
        elif span is None:
            catalogue.put_run(key, nbytes, 100)
        elif catalogue.n_tokens(key) is not None:
            catalogue.put_chunk(key, span, nbytes)


def put(catalogue: Catalogue, entry: Entry, nbytes: int) -> None:
    key, span = entry
    if span is None:
        catalogue.put_run(key, nbytes, 100)
    else:
        catalogue.put_chunk(key, span, nbytes)


def tried(catalogue: Catalogue, entry: Entry, nbytes: int) -> list[Entry] | None:
    """The victims, found by discarding what is longest unused until it fits; None if it never does."""
    catalogue = copy.deepcopy(catalogue)
    order = [used for used in catalogue._longest_unused_first if used not in (entry, (entry[0], None))]
    put(catalogue, entry, nbytes)
    victims = []
    while catalogue.nbytes > catalogue.capacity:
        if not order:
            return None
        victims.append(order.pop(0))
        catalogue.discard(victims[-1], keep=entry[0])
    return victims


@given(st.lists(calls, max_size=30), st.sampled_from(KEYS), st.sampled_from([None, *SPANS]), st.integers(1, 60))
def test_victims_are_the_longest_unused_and_no_more_than_needed(
    history: list[Call], key: RunKey, span: Span | None, nbytes: int
) -> None:
    catalogue = Catalogue(10**6)
    play(catalogue, history)
    if span is not None and catalogue.n_tokens(key) is None:
        catalogue.put_run(key, 5, 100)
    catalogue.capacity = max(catalogue.nbytes, 40)
    expected = tried(catalogue, (key, span), nbytes)
    if expected is None:
        with pytest.raises(StoreFailed, match="capacity"):
            catalogue.victims((key, span), nbytes)
    else:
        assert catalogue.victims((key, span), nbytes) == expected


@given(st.lists(calls, max_size=60))
def test_bytes_are_the_sum_of_what_is_held(history: list[Call]) -> None:
    catalogue = Catalogue(10**6)
    play(catalogue, history)
    entries = [(key, span) for key in catalogue for span in (None, *catalogue.chunks(key))]
    assert catalogue.nbytes == sum(catalogue.version(entry).nbytes for entry in entries)
    gone = [lost for entry in list(catalogue._longest_unused_first) for lost in catalogue.discard(entry)]
    assert sorted(map(str, gone)) == sorted(map(str, entries))
    assert catalogue.nbytes == 0
