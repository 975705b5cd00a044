"""How requests share the budget of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.vllm.worker.forwards import shares

needs = st.lists(st.integers(0, 50), max_size=8)


@given(needs, st.integers(0, 200))
def test_all_is_given_as_long_as_somebody_needs_it(given_needs, amount):
    result = shares(given_needs, amount)
    assert len(result) == len(given_needs)
    assert all(0 <= share <= need for share, need in zip(result, given_needs, strict=True))
    assert sum(result) == min(amount, sum(given_needs))


@given(needs.filter(bool), st.integers(0, 200))
def test_one_half_is_shared_equally(given_needs, amount):
    equal = amount // 2 // len(given_needs)
    assert all(share >= min(need, equal) for share, need in zip(shares(given_needs, amount), given_needs, strict=True))


@pytest.mark.parametrize(
    ("given_needs", "amount", "expected"),
    [
        ([1000, 1000], 100, [75, 25]),
        ([10_000, 30, 30], 120, [80, 20, 20]),
        ([30, 30, 10_000], 120, [30, 30, 60]),
        ([5, 5, 5], 1, [1, 0, 0]),
        ([], 10, []),
    ],
)
def test_the_rest_goes_to_the_oldest(given_needs, amount, expected):
    assert shares(given_needs, amount) == expected
