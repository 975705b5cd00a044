"""Token buffers: one form inside, whatever a caller has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.errors import InvalidInput
from blendhub.core.tokens import as_tokens


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_every_good_buffer_becomes_the_same_read_only_array(ids):
    array = np.array(ids, np.uint32)
    raw, read_only = array.tobytes(), array.copy()
    read_only.flags.writeable = False
    unaligned = memoryview(b"x" + raw)[1:]
    for buffer in (array, raw, bytearray(raw), memoryview(raw), unaligned, read_only, np.repeat(array, 2)[::2]):
        tokens = as_tokens(buffer)
        assert tokens.tolist() == ids
        assert tokens.dtype == np.uint32 and tokens.ndim == 1
        assert tokens.flags.c_contiguous and tokens.flags.aligned and not tokens.flags.writeable
    if ids:
        assert np.shares_memory(as_tokens(array), array) and array.flags.writeable, "it is viewed, and stays as it was"


def test_every_bad_buffer_is_refused():
    array = np.arange(10, dtype=np.uint32)
    raw = array.tobytes()
    arrays = [*map(array.astype, (np.int64, np.int32, np.float64)), np.stack([array, array]), np.array(array[0])]
    others = [array.tolist(), tuple(array.tolist()), None, "tokens", raw[:-1], memoryview(raw)[:-3]]
    for buffer in (*arrays, *others):
        with pytest.raises(InvalidInput, match="token"):
            as_tokens(buffer)
