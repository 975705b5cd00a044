"""What BlendHub gives to drafters whose KV it computes for chosen tokens; beside others no text is moved."""

import numpy as np
import pytest
import torch

from blendhub import Span
from blendhub.core.errors import Unsupported
from blendhub.vllm.model.drafter import Drafter
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from tests.stand_in import StandIn


def proposer(name, **attributes):
    seen = []
    model = StandIn(combine_hidden_states=lambda states: states.sum(-1, keepdim=True), embed_input_ids=torch.neg)

    class Model(StandIn):
        def __call__(self, **inputs):
            seen.append(inputs)

    made = type(name, (StandIn,), {})(model=Model(**vars(model)), supports_mm_inputs=False, **attributes)
    return made, seen


def drafter(made, **speculation):
    usual = {"method": "eagle", "parallel_drafting": False, "use_heterogeneous_vocab": False}
    return Drafter(made, torch.nn.Module(), StandIn(speculative_config=StandIn(**usual | speculation)))


def test_a_head_gets_the_token_behind_each_one_and_the_hidden_states_it_asks_for():
    tokens = np.arange(100, 120, dtype=np.uint32)
    chosen = RecomputeSet([RequestTokens(tokens, [np.arange(2)], [Span(3, 6), Span(18, 20)])])
    ids, behind = torch.from_numpy(chosen.ids), torch.from_numpy(chosen.ids_behind)
    last, aux = torch.ones(5, 4), [torch.ones(5, 2), torch.ones(5, 2)]
    for name, computed, given, width in (
        ("EagleProposer", last, behind, 4), ("MTPSpeculator", (last, aux), behind, 1),
        ("DraftModelProposer", last, ids, None), ("StandaloneARSpeculator", (last, aux), ids, None),
    ):  # fmt: skip
        made, seen = proposer(name)
        drafter(made).forward(ids, behind, ids, computed)
        (inputs,) = seen
        assert inputs["input_ids"] is given
        assert inputs["hidden_states"].shape[1] == width if width else "hidden_states" not in inputs
    assert behind.tolist() == [119, 119, 104, 105, 106], "the last known token stands for the one behind it"


@pytest.mark.parametrize(
    "name, speculation",
    [
        ("DFlashProposer", {}),
        ("Step3p5MTPProposer", {"method": "mtp"}),
        ("MultiModuleMTPSpeculator", {"method": "mtp"}),
        ("EagleProposer", {"parallel_drafting": True}),
        ("DraftModelProposer", {"use_heterogeneous_vocab": True}),
    ],
)
def test_beside_other_drafters_no_text_is_moved(name, speculation):
    made, _ = proposer(name)
    with pytest.raises(Unsupported, match=f"text is not moved, because .*{name}"):
        drafter(made, **speculation)
