"""Token buffers: one form inside, whatever a caller has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.errors import InvalidInput
from blendhub.core.tokens import as_tokens
from blendhub.testing.matchers.refusing import BAD_BUFFERS, GOOD_BUFFERS


@pytest.mark.parametrize("form", GOOD_BUFFERS)
@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_every_good_buffer_becomes_the_same_read_only_array(form, ids):
    tokens = as_tokens(GOOD_BUFFERS[form](np.array(ids, np.uint32)))
    assert tokens.tolist() == ids
    assert tokens.dtype == np.uint32 and tokens.ndim == 1
    assert tokens.flags.c_contiguous and tokens.flags.aligned and not tokens.flags.writeable


@pytest.mark.parametrize("form", BAD_BUFFERS)
def test_every_bad_buffer_is_refused(form):
    with pytest.raises(InvalidInput, match="token"):
        as_tokens(BAD_BUFFERS[form](np.arange(10, dtype=np.uint32)))


def test_a_good_array_is_viewed_and_not_copied():
    array = np.arange(10, dtype=np.uint32)
    assert np.shares_memory(as_tokens(array), array)
    assert array.flags.writeable, "the caller's own array stays as it was"
