"""Configurations of vLLM in which text cannot be moved, or nothing can be stored: each is refused with a sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.checks import model_check
from tests.stand_in import StandIn


def configured(*, parallel=None, model=None, speculative=None):
    """What a configuration has that the checks read, with these fields changed."""
    one = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_size": 1,
        "is_moe_model": False,
    }
    one_model = dict.fromkeys(["is_encoder_decoder", "enable_sleep_mode"], False)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**one | (parallel or {})),
        model_config=SimpleNamespace(**one_model | (model or {})),
        speculative_config=speculative and SimpleNamespace(method=speculative),
    )


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            {"parallel": {"data_parallel_size": 2, "is_moe_model": True}},
            "experts are spread over data-parallel engines",
        ),
        # vLLM has not found out yet.
        (
            {"parallel": {"data_parallel_size": 2, "is_moe_model": None}},
            "experts are spread over data-parallel engines",
        ),
    ],
)
def test_configurations_in_which_text_cannot_be_moved(changed, words):
    with pytest.raises(Unsupported, match=words):
        model_check._refuse_to_blend(StandIn(config=configured(**changed), module=torch.nn.Module()))


def test_a_model_that_keeps_features_of_images_between_embedding_and_forward_moves_no_text():
    """Such as Qwen3-VL's: the runner embeds a step's tokens, then calls the connector, and then the model."""
    model = StandIn(config=configured(), module=torch.nn.Module())
    model.module.language = torch.nn.Module()
    model.module.deepstack_input_embeds = []
    with pytest.raises(Unsupported, match="a forward of BlendHub in between would take them"):
        model_check._refuse_to_blend(model)


@pytest.mark.parametrize(
    "changed", [{}, {"parallel": {"data_parallel_size": 2}}, {"speculative": "eagle"}], ids=["usual", "data", "eagle"]
)
def test_others_are_not_refused(changed):
    model = StandIn(config=configured(**changed), module=torch.nn.Module())
    model_check._refuse_to_blend(model)
    model_check._refuse_to_reuse(model)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "context parallelism"),
        # vllm-ascend's.
        ({"parallel": {"prefill_context_parallel_size": 2}}, "context parallelism"),
        ({"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model": {"enable_sleep_mode": True}}, "vLLM may unmap the KV cache while KV is being copied"),
        # Without sleep mode it serves ``release_kv_cache_memory``; vLLM 0.23 has it for sleep mode only.
        ({"model": {"enable_cumem_allocator": True}}, "vLLM may unmap the KV cache while KV is being copied"),
    ],
)
def test_configurations_in_which_nothing_is_stored(changed, words):
    model: Any = SimpleNamespace(config=configured(**changed))
    with pytest.raises(Unsupported, match=words):
        model_check._refuse_to_reuse(model)
