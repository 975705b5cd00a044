"""Wilson's interval, held to its definition."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.outcome.agreement import wilson


@given(st.integers(0, 400), st.integers(0, 400), st.floats(0.5, 4))
def test_the_ends_are_the_shares_from_which_the_observed_one_is_as_far_as_allowed(agreed, disagreed, quantile):
    audits = agreed + disagreed
    interval = wilson(agreed, audits, quantile)
    if not audits:
        assert interval == (0, 1)
        return
    assert 0 <= interval.low <= agreed / audits <= interval.high <= 1
    for end in interval:
        if 0 < end < 1:
            reach = quantile * math.sqrt(end * (1 - end) / audits)
            assert abs(agreed / audits - end) == pytest.approx(reach, rel=1e-6, abs=1e-9)
