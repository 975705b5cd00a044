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
spans = st.lists(
    st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(lambda ends: Span(min(ends), max(ends))), max_size=6
).map(join_spans)
parts = st.lists(spans, min_size=1, max_size=4).filter(lambda given: any(map(total, given)))


@given(parts, st.randoms(use_true_random=False))
def test_each_token_is_the_one_of_its_prompt_at_its_place(given_parts, random):
    numbers = list(range(1000))
    random.shuffle(numbers)
    made = [
        RequestTokens(np.array(numbers[i::7][:LENGTH], np.uint32), [np.array(numbers[i::7][: LENGTH // BLOCK])], spans)
        for i, spans in enumerate(given_parts)
    ]
    chosen = RecomputeSet(made)
    expected = sorted(((s, n) for n, part in enumerate(made) for s in part.spans), key=lambda one: len(one[0]))
    assert chosen.spans == [span for span, _ in expected]
    tokens = [(number, position) for span, number in expected for position in range(span.start, span.end)]
    assert len(chosen) == len(tokens)
    assert chosen.ids.tolist() == [made[number].tokens[position] for number, position in tokens]
    assert chosen.ids.dtype == np.int32
    assert chosen.slots(BLOCK).tolist() == [
        made[number].tables[0][position // BLOCK] * BLOCK + position % BLOCK for number, position in tokens
    ]
    for number in range(len(made)):
        places = chosen.places(number)
        assert [tokens[place] for place in places] == [one for one in tokens if one[0] == number]
    assert all(chosen.place(*token) == place for place, token in enumerate(tokens))
