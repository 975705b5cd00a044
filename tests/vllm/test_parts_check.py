"""The check of chosen tokens on models whose rounding depends on the shape of a batch: 64 experts with near ties."""

import pytest
import torch

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.checks.model_check import groups_and_rotations
from blendhub.vllm.model.checks.parts_check import check_parts
from blendhub.vllm.model.layer_groups import pages_of
from tests.vllm.stand_in_model import StandInModel

EXPERTS = 64


class Routed(StandInModel):
    """Keys and values come from one of 64 experts; the router rounds as bfloat16 does, differently for each shape."""

    def __init__(self, seed=0, ties=0.3):
        super().__init__(n_layers=4)
        generator = torch.Generator().manual_seed(seed)
        size = 1000, len(self.layer_names)
        logits = torch.randn(*size, EXPERTS, generator=generator)
        best = logits.argmax(-1, keepdim=True)
        other = (best + 1) % EXPERTS
        has_tie = torch.rand(*size, 1, generator=generator) < ties
        logits.scatter_(-1, other, torch.where(has_tie, logits.gather(-1, best), torch.tensor(-9.0)))
        self._logits = logits
        self._experts = torch.randn(EXPERTS, 2, generator=generator)

    def computed(self, index, chosen, positions=None):
        keys, values = super().computed(index, chosen, positions)
        logits = self._logits[torch.from_numpy(chosen.ids.astype("int64")), index]
        rounding = torch.Generator().manual_seed(1000 * index + len(chosen))
        logits = logits * (1 + 2**-8 * torch.randn(logits.shape, generator=rounding))
        expert = self._experts[logits.argmax(-1)]
        return keys * (1 + 0.3 * expert[:, :1, None]), values * (1 + 0.3 * expert[:, 1:, None])


class WrongInParts(Routed):
    """Attention misses what stands before a span, unless the span is the first."""

    def computed(self, index, chosen, positions=None):
        keys, values = super().computed(index, chosen, positions)
        lost = torch.from_numpy(chosen.positions > 0)[:, None, None] if chosen.positions[0] or len(chosen) == 2 else 0
        return keys, values * (1 - 0.8 * torch.as_tensor(lost, dtype=values.dtype))


def check(model):
    groups, _ = groups_and_rotations(model, 32)
    check_parts(model, pages_of(model, groups))


def test_near_ties_between_experts_are_no_reason_to_refuse_and_hide_no_attention_that_misses_tokens():
    for seed in range(20):
        check(Routed(seed))
        with pytest.raises(Unsupported, match="tokens computed in parts are off by"):
            check(WrongInParts(seed))


def test_without_near_ties_the_bound_is_that_of_the_dtype():
    check(Routed(ties=0.0))
    with pytest.raises(Unsupported, match=r"layers.0.attn: most tokens .* \(allowed 0.0%\)"):
        check(WrongInParts(ties=0.0))


def test_where_shapes_change_most_tokens_nothing_can_be_checked():
    undecided = Routed()
    undecided._logits.fill_(1.0)
    undecided._experts *= 5
    with pytest.raises(Unsupported, match="in a forward changes the KV of most tokens by"):
        check(undecided)
