"""How long the stored chunks of a model with attention windows are."""

from hypothesis import given
from hypothesis import strategies as st

from blendhub.vllm.model.engine_model import EngineModel


@given(st.integers(1, 300), st.sets(st.integers(2, 400), max_size=3))
def test_a_chunk_lies_in_one_window_and_is_in_it_still_when_it_is_complete(most, windows):
    model = EngineModel.__new__(EngineModel)
    model._windows = windows
    fitting = [n for n in range(1, most + 1) if all(2 * n <= window and not window % n for window in windows)]
    assert model.chunk_tokens(most) == max(fitting)
