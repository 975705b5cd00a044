"""Attention of chosen tokens, held against a loop over tokens, heads and keys."""

import math
from unittest import mock

import pytest

pytest.importorskip("torch", reason="attention is computed by torch: pip install torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from blendhub.contracts import AttentionRules
from blendhub.devices import chosen_attention
from blendhub.devices.chosen_attention import Keys, attend, received

WIDTH, VALUE_WIDTH = 4, 6


def by_hand(queries, positions, keys, rules):
    n, heads, _ = queries.shape
    group = heads // keys.keys.shape[1]
    result, received = torch.zeros(n, heads, VALUE_WIDTH, dtype=torch.float64), torch.zeros(len(keys.positions))
    for token in range(n):
        for head in range(heads):
            weights = {}
            for number, at in enumerate(keys.positions.tolist()):
                own = int(positions[token])
                in_chunk = rules.chunk is None or at // rules.chunk == own // rules.chunk
                if at <= own and in_chunk and (rules.window is None or own - at < rules.window):
                    product = float(queries[token, head].double() @ keys.keys[number, head // group].double())
                    product *= rules.scale
                    if rules.soft_cap:
                        product = rules.soft_cap * math.tanh(product / rules.soft_cap)
                    weights[number] = math.exp(product)
            total = sum(weights.values()) + (math.exp(float(rules.sinks[head])) if rules.sinks is not None else 0)
            for number, weight in weights.items():
                result[token, head] += weight / total * keys.values[number, head // group].double()
                received[number] += weight / total
    return result.float(), received


@st.composite
def cases(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    n_keys, n = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)]))
    at = torch.randperm(20, generator=generator)[:n_keys]
    keys = Keys(at, numbers(n_keys, heads, WIDTH), numbers(n_keys, heads, VALUE_WIDTH))
    # Each token attends to one key at least: its own.
    positions = at[torch.randint(n_keys, (n,), generator=generator)]
    sinks = numbers(heads * group) if draw(st.booleans()) else None
    window, chunk = draw(st.sampled_from([(None, None), (1, None), (3, None), (50, None), (None, 4), (3, 8)]))
    rules = AttentionRules(heads * group, 0.7, window, chunk, draw(st.sampled_from([0.0, 1.5])), sinks)
    return numbers(n, heads * group, WIDTH), positions, keys, rules


@given(slice_bytes=st.sampled_from([1, 200, 2**26]), case=cases())
def test_attention_is_what_a_loop_computes(slice_bytes, case):
    """Token by token and head by head, or all at once."""
    queries, positions, keys, rules = case
    expected, weights = by_hand(*case)
    with mock.patch.object(chosen_attention, "SLICE_BYTES", slice_bytes):
        whole = attend(*case)
        counted = received(queries, positions, keys, rules, whole.log_sums)
    torch.testing.assert_close(whole.taken, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(counted, weights, rtol=1e-4, atol=1e-5)


def test_numbers_of_half_precision_are_multiplied_in_float32():
    queries, keys = (torch.full((1, 1, 64), 40.0, dtype=torch.float16) for _ in range(2))
    values = torch.ones(1, 1, 64, dtype=torch.float16)
    assert (
        attend(queries, torch.zeros(1), Keys(torch.zeros(1), keys, values), AttentionRules(1, 1.0))
        .taken.isfinite()
        .all()
    )
