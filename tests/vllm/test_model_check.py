"""The start-up checks: what cannot be reused or moved is found on the model itself, and on all ranks alike."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.checks import model_check
from blendhub.vllm.model.checks.copies import count_copies
from blendhub.vllm.model.checks.model_check import check_model, groups_and_rotations
from blendhub.vllm.model.checks.parts_check import check_parts
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.layer_groups import pages_of
from tests.stand_in import StandIn
from tests.vllm.stand_in_model import StandInModel, config_of
from tests.vllm.two_ranks import ALONE, ENDED, forward_together, on_two_ranks

PROBING = StandIn(probe_layer=1, attended_layers=())
"""A selector."""
USUAL = StandInModel


def fail(*given, **named):
    raise RuntimeError("no kernel")


def differing(change):
    """A model that computes other keys in a forward."""

    def computed(self, layer, chosen, positions=None):
        keys, values = USUAL.computed(self, layer, chosen, positions)
        return keys * change(chosen, positions), values

    return {"computed": computed}


def rolled(self, index, keys, values, slots):
    USUAL.write(self, index, keys, values, slots.roll(1))


def probed(self, layer, chosen):
    return [0.9 * rows for rows in USUAL.forward_until(self, layer, chosen)]


FAULTS: dict[str, tuple[bool, Any]] = {
    "keys are not where BlendHub expects them": (False, {"write": rolled}),
    "writing into the pages, and reading back, failed: RuntimeError: no kernel": (False, {"write": fail}),
    "tokens computed in parts are off by": (True, differing(lambda chosen, _: 1 + 0.1 * (len(chosen.spans) - 1))),
    "the probed KV is off by": (True, {"forward_until": probed}),
    "rotated to another position they are off by": (
        True,
        differing(lambda _, positions: 1.0 if positions is None else 1.0 + float(positions[0])),
    ),
}
"""What a check says, whether exact prefixes are reused all the same, and the methods of a model that fails it."""


def on_rank_1(methods, selector=PROBING, **options):
    """Whether the layers are known, whether the model blends, the reasons, and the number of rotations."""

    def work(ranks):
        kind = type("Broken", (USUAL,), methods) if ranks.number else USUAL
        model: Any = kind(forward_together, **(options if ranks.number else {}))
        groups, candidates = groups_and_rotations(model, 256)
        check = check_model(model, groups, candidates, selector, ranks)
        return check.support.layouts != (), check.support.blends, check.support.reasons, len(check.rotations)

    return work


@pytest.mark.parametrize("sentence", FAULTS)
def test_a_check_that_fails_on_one_rank_fails_on_both_and_the_rank_is_named(sentence):
    reuses, methods = FAULTS[sentence]
    for has_layout, blends, (reason,), n_rotations in on_two_ranks(on_rank_1(methods)):
        assert (has_layout, blends, n_rotations) == (reuses, False, 0)
        assert sentence in reason and "(rank 1 of 2)" in reason
        assert reason.endswith("; exact prefixes are reused all the same") == reuses


def test_ranks_choose_the_same_rotations_or_move_no_keys():
    assert on_two_ranks(on_rank_1({})) == [(True, True, (), 2)] * 2
    for _, blends, (reason,), _ in on_two_ranks(on_rank_1({}, base=500.0)):
        assert not blends and "rotary embeddings of the ranks" in reason


@pytest.mark.parametrize("kv, copies", {"aaaa": 4, "aabb": 2, "abab": 1, "aaab": 1, "aabc": 1, "a": 1}.items())
def test_copies_are_on_neighbouring_ranks_in_groups_of_one_size_if_weights_are_no_dummies(kv, copies):
    assert count_copies([*kv], [*"wxyz"[: len(kv)]]) == copies
    assert count_copies([*kv], ["w"] * len(kv)) == 1


@pytest.mark.parametrize("errors, blends", [((0, 6e-5, 1.5e-4, 4e-4), True), ((0, 6e-5, 6e-5, 4e-4), False)])
def test_layers_far_from_the_first_may_round_by_position_but_one_that_is_suddenly_wrong_moves_no_keys(errors, blends):
    """With sinks in its attention, a model's own rounding exceeds the tolerance of one layer after a dozen of them."""

    def computed(self, layer, chosen, positions=None):
        share = errors[layer] * (positions is not None and float(positions[0]) > 1000)
        return [(1 + share) * rows for rows in USUAL.computed(self, layer, chosen, positions)]

    model: Any = type("Rounding", (USUAL,), {"computed": computed})(n_layers=len(errors))
    check = check_model(model, *groups_and_rotations(model, 256), PROBING, ALONE)
    assert check.support.blends == blends, check.support.reasons
    assert blends or "layers.3.attn cannot be moved" in check.support.reasons[0]


def test_a_selector_that_asks_what_is_attended_to_picks_without_it_where_it_cannot_be_measured():
    asking = StandIn(probe_layer=1, attended_layers=(0.5,))
    for has_layout, blends, (reason,), n_rotations in on_two_ranks(on_rank_1({}, asking)):
        assert (has_layout, blends, n_rotations) == (True, True, 2)
        assert "picks without knowing what the end of a prompt attends to" in reason


def test_a_rank_that_leaves_the_others_in_a_forward_ends_the_engine_with_a_sentence():
    _, (ended, sentence) = on_two_ranks(on_rank_1({"forward": fail}), patience_s=1.0)
    assert ended == ENDED and "rank 1 of 2 waited for the other ranks" in sentence


IMAGES: Any = torch.nn.Module()
IMAGES.language = torch.nn.Module()
IMAGES.language.deepstack_input_embeds = []
"""Such as Qwen3-VL: the runner embeds a step's tokens, then calls the connector, and then the model."""


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),  # vllm-ascend's
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"data_parallel_size": 2, "is_moe_model": True}, "experts are spread over data-parallel engines"),
        ({"data_parallel_size": 2, "is_moe_model": None}, "experts are spread over"),  # vLLM has not found out yet
        ({"module": IMAGES}, "a forward of BlendHub in between would take them"),
        ({"data_parallel_size": 2}, ""),
        ({"why_no_drafts": "the drafter is of another kind"}, "the drafter is of another kind"),
        ({"has_indexer": True, "why_no_drafts": "it has one, too"}, "an indexer picks by keys of 8 bits"),
    ],
)
def test_configurations_in_which_nothing_is_stored_or_text_is_not_moved(changed, words):
    usual: dict[str, Any] = {"module": torch.nn.Module(), "why_no_drafts": "", "recurrent": {}, "has_indexer": False}
    model = StandIn(config=config_of(**changed), **usual | {name: changed[name] for name in usual.keys() & changed})
    with pytest.raises(Unsupported, match=words) if words else nullcontext():
        model_check._refuse_to_reuse(model)
        model_check._refuse_to_blend(model)


# Without sleep mode vLLM's allocator serves ``release_kv_cache_memory``; vLLM 0.23 has it for sleep mode only.
@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_nothing_is_reused_where_vllm_may_unmap_its_kv_cache_without_telling_a_connector(option, monkeypatch):
    changed: dict[str, Any] = {option: True}
    model = StandIn(config=config_of(**changed), recurrent={})
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", None, raising=False)
    model_check._refuse_to_reuse(model)
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches")
    with pytest.raises(Unsupported, match="may unmap the KV cache while KV is being copied"):
        model_check._refuse_to_reuse(model)


def test_of_recurrent_layers_nothing_is_reused_where_vllm_clears_what_was_loaded(monkeypatch):
    model = StandIn(config=config_of(), recurrent={"layers.0": (0, None)})
    monkeypatch.setattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids", None, raising=False)
    model_check._refuse_to_reuse(model)
    monkeypatch.delattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")
    with pytest.raises(Unsupported, match="clears blocks of such models"):
        model_check._refuse_to_reuse(model)


EXPERTS = 64


class Routed(StandInModel):
    """Keys and values come from one of 64 experts; the router rounds as bfloat16 does, differently for each shape."""

    def __init__(self, seed=0, ties=0.3, misses=False):
        """``misses``: attention misses what stands before a span, unless the span is the first."""
        super().__init__(n_layers=4)
        self._misses = misses
        generator = torch.Generator().manual_seed(seed)
        size = 1000, len(self.layer_names)
        logits = torch.randn(*size, EXPERTS, generator=generator)
        best = logits.argmax(-1, keepdim=True)
        has_tie = torch.rand(*size, 1, generator=generator) < ties
        logits.scatter_(-1, (best + 1) % EXPERTS, torch.where(has_tie, logits.gather(-1, best), torch.tensor(-9.0)))
        self._logits = logits
        self._experts = torch.randn(EXPERTS, 2, generator=generator)

    def computed(self, index, chosen, positions=None):
        keys, values = super().computed(index, chosen, positions)
        logits = self._logits[torch.from_numpy(chosen.ids.astype("int64")), index]
        rounding = torch.Generator().manual_seed(1000 * index + len(chosen))
        logits = logits * (1 + 2**-8 * torch.randn(logits.shape, generator=rounding))
        expert = self._experts[logits.argmax(-1)]
        values = values * (1 + 0.3 * expert[:, 1:, None])
        if self._misses and (chosen.positions[0] or len(chosen) == 2):
            values = values * torch.where(torch.from_numpy(chosen.positions > 0), 0.2, 1.0)[:, None, None]
        return keys * (1 + 0.3 * expert[:, :1, None]), values


def check_parts_of(model):
    groups, _ = groups_and_rotations(model, 32)
    check_parts(model, pages_of(model, groups))


def test_near_ties_between_experts_are_no_reason_to_refuse_and_hide_no_attention_that_misses_tokens():
    for seed in range(5):
        check_parts_of(Routed(seed))
        with pytest.raises(Unsupported, match="tokens computed in parts are off by"):
            check_parts_of(Routed(seed, misses=True))
    check_parts_of(Routed(ties=0.0))
    with pytest.raises(Unsupported, match=r"layers.0.attn: most tokens .* \(allowed 0.0%\)"):
        check_parts_of(Routed(ties=0.0, misses=True))
    undecided = Routed()
    undecided._logits.fill_(1.0)
    undecided._experts *= 5
    with pytest.raises(Unsupported, match="in a forward changes the KV of most tokens by"):
        check_parts_of(undecided)


@given(st.integers(1, 300), st.sets(st.integers(2, 400), max_size=3), st.none() | st.integers(1, 1100))
def test_a_stored_chunk_lies_in_one_window_and_in_it_still_when_it_is_complete_and_ends_where_states_are(
    most, windows, state_block
):
    model: Any = EngineModel.__new__(EngineModel)
    model._windows, model.block_sizes = windows, (16, state_block)
    model.recurrent = {"layer": (1, None)} if state_block else {}
    fitting = [n for n in range(1, most + 1) if all(2 * n <= window and not window % n for window in windows)]
    assert model.chunk_tokens(most) == max(n for n in fitting if not state_block or not state_block % n)
