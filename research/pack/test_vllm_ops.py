"""The stand-ins for vLLM's compiled operators, held against plain loops."""

import pytest

pytest.importorskip("torch", reason="the stand-ins are written in torch: pip install torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from research.pack import vllm_ops


@given(
    n=st.integers(1, 20),
    choices=st.integers(1, 4),
    n_experts=st.integers(4, 9),
    block=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**16),
)
def test_choices_stand_expert_by_expert_in_whole_blocks(n, choices, n_experts, block, seed):
    torch.manual_seed(seed)
    experts = torch.stack([torch.randperm(n_experts)[:choices] for _ in range(n)]).int()
    most = n * choices + n_experts * (block - 1)
    places, of_block, n_padded = (torch.empty(size, dtype=torch.int32) for size in (most, -(-most // block), 1))
    vllm_ops.moe_align_block_size(experts, n_experts, block, places, of_block, n_padded)
    expected_places, expected_blocks = [], []
    for expert in range(n_experts):
        mine = [place for place, chosen in enumerate(experts.flatten().tolist()) if chosen == expert]
        n_blocks = -(-len(mine) // block)
        expected_places += mine + [n * choices] * (n_blocks * block - len(mine))
        expected_blocks += [expert] * n_blocks
    assert n_padded.item() == len(expected_places)
    assert places[: len(expected_places)].tolist() == expected_places
    assert of_block[: len(expected_blocks)].tolist() == expected_blocks


def test_a_weak_reference_is_the_same_memory_and_keeps_nothing():
    numbers = torch.arange(12.0).view(3, 4)[1:, ::2]
    weak = vllm_ops.weak_ref_tensor(numbers)
    numbers += 1
    assert weak.data_ptr() == numbers.data_ptr() and torch.equal(weak, numbers)
    assert weak.untyped_storage()._cdata != numbers.untyped_storage()._cdata


@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_norms_and_activation(renormalize):
    scores, weights, experts = torch.randn(5, 8), torch.empty(5, 3), torch.empty(5, 3, dtype=torch.int32)
    vllm_ops.topk_softmax(weights, experts, torch.empty(5, 3), scores, renormalize)
    for row, token in enumerate(scores.softmax(-1)):
        best = sorted(range(8), key=lambda expert: -token[expert])[:3]
        assert experts[row].tolist() == best
        assert torch.allclose(weights[row], token[best] / (token[best].sum() if renormalize else 1))
    numbers, residual, weight, out = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.empty(3, 4)
    total = numbers + residual
    vllm_ops.fused_add_rms_norm(numbers, residual, weight, 1e-6)
    normed = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert torch.allclose(residual, total) and torch.allclose(numbers, normed, atol=1e-6)
    vllm_ops.silu_and_mul(out, total)
    assert torch.allclose(out, total[:, :4] * total[:, :4].sigmoid() * total[:, 4:], atol=1e-6)
