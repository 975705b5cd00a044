"""The order of a forward's tokens, and where each part's tokens stand in it, against a look at one token at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

from blendhub import Span
from blendhub.core.spans import join_spans, total
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens

LENGTH, BLOCK = 40, 8
places = st.integers(0, LENGTH)
spans = st.lists(st.tuples(places, places).map(lambda ends: Span(min(ends), max(ends))), max_size=6).map(join_spans)


@given(st.lists(spans, min_size=1, max_size=4).filter(lambda parts: any(map(total, parts))), st.integers(0, 99))
def test_each_token_is_the_one_of_its_prompt_at_its_place(spans_of_parts, seed):
    random = np.random.default_rng(seed)
    parts = [
        RequestTokens(random.integers(0, 2**31, LENGTH, np.uint32), [random.permutation(LENGTH // BLOCK)], spans)
        for spans in spans_of_parts
    ]
    chosen = RecomputeSet(parts)
    expected = sorted(((span, n) for n, part in enumerate(parts) for span in part.spans), key=lambda pair: len(pair[0]))
    assert chosen.spans == [span for span, _ in expected]
    tokens = [(number, position) for span, number in expected for position in range(span.start, span.end)]
    assert chosen.ids.dtype == np.int32
    assert chosen.ids.tolist() == [parts[number].tokens[position] for number, position in tokens]
    assert chosen.slots(BLOCK).tolist() == [
        parts[number].tables[0][position // BLOCK] * BLOCK + position % BLOCK for number, position in tokens
    ]
    for part in range(len(parts)):
        assert [tokens[place] for place in chosen.places(part)] == [token for token in tokens if token[0] == part]
