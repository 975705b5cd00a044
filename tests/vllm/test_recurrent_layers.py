"""What a map makes of a state, and maps that cannot be right."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blendhub import Span
from blendhub.core.errors import HubError, Unsupported
from blendhub.vllm.model.states.gated_delta import GatedDelta
from blendhub.vllm.model.states.maps import check_maps, unpacked
from blendhub.vllm.model.states.recurrent_layer import MapInMaking, joined

HEADS, WIDTH, ROWS = 5, 8, 3


def layer(dtype: torch.dtype) -> GatedDelta:
    convolution = torch.zeros(2, ROWS, 3 * HEADS * WIDTH, dtype=torch.bfloat16)
    states = torch.zeros(2, HEADS, WIDTH, WIDTH, dtype=dtype)
    made: Any = SimpleNamespace(kv_cache=[convolution, states], conv1d=SimpleNamespace(bias=None))
    return GatedDelta("a layer", made)


def drawn(remembers: list[bool]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A map, its ``A`` of all heads, and its ``B``."""
    kept = torch.randn(HEADS, WIDTH, WIDTH).to(torch.bfloat16) * torch.tensor(remembers)[:, None, None]
    added = torch.randn(HEADS, WIDTH, WIDTH).to(torch.bfloat16)
    last_inputs = torch.randn(ROWS, 3 * HEADS * WIDTH).to(torch.bfloat16)
    flags = torch.tensor(remembers)
    return joined(flags, last_inputs, torch.cat([added, kept[flags]])), kept.float(), added.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remembers", [[True] * 5, [False] * 5, [True, False, False, True, True]])
def test_a_map_takes_a_state_along_and_leaves_the_memory_that_others_read(dtype, remembers):
    torch.manual_seed(0)
    gated, (made, kept, added) = layer(dtype), drawn(remembers)
    memory = made.numpy()
    before, state = memory.copy(), torch.randn(HEADS, WIDTH, WIDTH).to(dtype)
    for _ in range(2):
        gated._states[1] = state
        gated.go_over(1, torch.from_numpy(memory))
        expected = kept @ state.float() + added
        assert torch.allclose(gated._states[1].float(), expected, atol=1e-5 if dtype is torch.float32 else 0.1)
        assert np.array_equal(memory, before)
    assert gated.length(made) == len(made)


def test_a_damaged_map_is_refused_before_it_is_used():
    gated, (made, _, _) = layer(torch.float32), drawn([True] * 5)
    with pytest.raises(HubError, match="shorter than it says"):
        unpacked(made[:-16], [gated])
    made[0] = 2
    assert len(unpacked(made, [gated])["a layer"]) == len(made)


def test_a_map_that_makes_of_another_state_what_its_layer_does_not_is_no_map():
    gated, (made, kept, added) = layer(torch.float32), drawn([True] * 5)
    other = torch.randn(HEADS, WIDTH, WIDTH)
    for expected, is_right in ((kept @ other + added, True), (other @ kept + added, False)):
        making = MapInMaking(Span(2, 9), done={"a layer": made}, tried={"a layer": (other, expected)})
        if is_right:
            check_maps(making, [gated], 0.04)
        else:
            with pytest.raises(Unsupported, match="the map of a text is off by"):
                check_maps(making, [gated], 0.04)
