"""What a map makes of a state, and maps that cannot be right."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from blendhub import Span
from blendhub.core.errors import HubError, Unsupported
from blendhub.vllm.model.states.gated_delta import GatedDelta
from blendhub.vllm.model.states.head_states import HeadStates
from blendhub.vllm.model.states.mamba2 import Mamba2
from blendhub.vllm.model.states.maps import check_maps, recurrent_layer, unpacked
from blendhub.vllm.model.states.recurrent_layer import MapInMaking, SpanStates, joined, padded

HEADS, WIDTH, ROWS = 5, 8, 3
KINDS = {"gated delta rule": (WIDTH, WIDTH), "Mamba 2": (WIDTH, 2 * WIDTH)}
"""By kind, the state of a head."""


def caches(kind: str, dtype: torch.dtype, columns: int) -> list[torch.Tensor]:
    convolution = torch.zeros(2, ROWS, columns, dtype=torch.bfloat16)
    return [convolution, torch.zeros(2, HEADS, *KINDS[kind], dtype=dtype)]


def layer(kind: str, dtype: torch.dtype) -> HeadStates:
    kv_cache = caches(kind, dtype, 3 * HEADS * WIDTH)
    if kind == "Mamba 2":
        mamba2: Any = SimpleNamespace(kv_cache=kv_cache, A=torch.zeros(HEADS))
        return Mamba2("a layer", mamba2)
    gated: Any = SimpleNamespace(kv_cache=kv_cache, conv1d=SimpleNamespace(bias=None))
    return GatedDelta("a layer", gated)


def drawn(kind: str, remembers: list[bool]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A map, its ``A`` of all heads as matrices, and its ``B``."""
    flags, added = torch.tensor(remembers), torch.randn(HEADS, *KINDS[kind]).to(torch.bfloat16)
    last_inputs = torch.randn(ROWS, 3 * HEADS * WIDTH).to(torch.bfloat16)
    if kind == "Mamba 2":
        shares = torch.rand(HEADS) * flags
        return joined(last_inputs, shares, added), shares[:, None, None] * torch.eye(WIDTH), added.float()
    kept = torch.randn(HEADS, WIDTH, WIDTH).to(torch.bfloat16) * flags[:, None, None]
    return joined(last_inputs, flags, torch.cat([added, kept[flags]])), kept.float(), added.float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remembers", [[True] * 5, [False] * 5, [True, False, False, True, True]])
def test_a_map_takes_a_state_along_and_leaves_the_memory_that_others_read(kind, dtype, remembers):
    torch.manual_seed(0)
    moving, (made, kept, added) = layer(kind, dtype), drawn(kind, remembers)
    memory = made.numpy()
    before, state = memory.copy(), torch.randn(HEADS, *KINDS[kind]).to(dtype)
    for _ in range(2):
        moving._states[1] = state
        moving.go_over(1, torch.from_numpy(memory))
        expected = kept @ state.float() + added
        assert torch.allclose(moving._states[1].float(), expected, atol=1e-5 if dtype is torch.float32 else 0.1)
        assert np.array_equal(memory, before)
    assert moving.length(made) == len(made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_map_is_refused_before_it_is_used(kind):
    moving, (made, _, _) = layer(kind, torch.float32), drawn(kind, [True] * 5)
    for n in (0, 16, len(made) - 16):
        with pytest.raises(HubError, match="shorter than it says"):
            unpacked(made[:n], [moving])
    made[padded(moving._convolution[0].nbytes)] = 2
    assert len(unpacked(made, [moving])["a layer"]) == len(made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_that_makes_of_another_state_what_its_layer_does_not_is_no_map(kind):
    moving, (made, kept, added) = layer(kind, torch.float32), drawn(kind, [True] * 5)
    other = torch.randn(HEADS, *KINDS[kind])
    for expected, is_right in ((kept @ other + added, True), (kept.flip(0) @ other + added, False)):
        making = MapInMaking(Span(2, 9), done={"a layer": made}, tried={"a layer": (other, expected)})
        if is_right:
            check_maps(making, [moving], 0.04)
        else:
            with pytest.raises(Unsupported, match="the map of a text is off by"):
                check_maps(making, [moving], 0.04)


class PlainMamba2(SimpleNamespace):
    """Mamba 2 token by token, with one group. A token is the gate, the inputs of the convolution, and the steps."""

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        (before, state), row = (rows.float() for rows in self.kv_cache), self.metadata()
        width, state_width = KINDS["Mamba 2"]
        n = HEADS * width
        for number, token in enumerate(projected_states.float()):
            window = torch.cat([before[row], token[None, n:-HEADS]])
            taken = torch.nn.functional.silu((window * self.weights).sum(0) + self.bias)
            x, key, query = taken.split([n, state_width, state_width])
            steps = torch.nn.functional.softplus(token[-HEADS:] + self.dt_bias)
            x = x.view(HEADS, width) * steps[:, None]
            state[row] = torch.exp(self.A * steps)[:, None, None] * state[row] + x[:, :, None] * key
            before[row], output[number] = window[1:], (state[row] @ query).flatten()
        self.kv_cache[0][row], self.kv_cache[1][row] = before[row].to(torch.bfloat16), state[row]


@pytest.mark.parametrize("ends", [[12], [5, 12], [1, 2, 11, 12]])
def test_the_map_of_mamba2_is_what_the_recurrence_makes_of_any_state_in_however_many_parts(ends):
    torch.manual_seed(0)
    context: Any = ForwardContext({}, {"a layer": None}, {}, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    width, state_width = KINDS["Mamba 2"]
    columns = HEADS * width + 2 * state_width
    plain: Any = PlainMamba2(
        kv_cache=caches("Mamba 2", torch.float32, columns),
        weights=torch.randn(ROWS + 1, columns),
        bias=torch.randn(columns),
        A=-torch.rand(HEADS) / 9,
        dt_bias=torch.randn(HEADS),
        metadata=lambda: context.attn_metadata["a layer"],
    )
    context.no_compile_layers["a layer"] = plain
    mamba2, inputs = Mamba2("a layer", plain), torch.randn(12, HEADS * width + columns + HEADS)
    last_inputs, first, other = torch.randn(ROWS, columns), *torch.randn(2, HEADS, width, state_width)

    def begin(state: torch.Tensor) -> None:
        plain.kv_cache[0][1], plain.kv_cache[1][1] = last_inputs, state

    begin(first)
    making, states = MapInMaking(Span(2, 14)), SpanStates(1, 1, 1)
    with override_forward_context(context):
        for start, end in zip([0, *ends], ends, strict=False):
            output = torch.zeros(end - start, HEADS * width)
            mamba2.compute_map(states, (inputs[start:end], output), making, is_last=end == 12)
        begin(other)
        mamba2.compute(states, (inputs, torch.zeros(12, HEADS * width)))
    expected = [rows[1].clone() for rows in plain.kv_cache]
    begin(other)
    mamba2.go_over(1, making.done["a layer"])
    assert torch.equal(plain.kv_cache[0][1], expected[0])
    assert float((plain.kv_cache[1][1] - expected[1]).norm() / expected[1].norm()) < 4e-3


def test_caches_of_mamba2_beside_its_state_have_no_map():
    replaying: Any = MambaMixer2.__new__(MambaMixer2)
    torch.nn.Module.__init__(replaying)
    replaying.kv_cache = [torch.zeros(2, 1)] * 5
    with pytest.raises(Unsupported, match="use_replayssm"):
        recurrent_layer("a layer", replaying)
