"""What BlendHub needs of vLLM's model runners: one that has it not is refused by name, as is KV of other kinds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.runner import NEEDED, Runner, find_caller
from tests.stand_in import StandIn


def made(specs=(), **changes):
    """A runner with a layer and a block table for each of these kinds of KV."""
    layers = [StandIn(layer_names=[f"layers.{number}"], kv_cache_spec=spec) for number, spec in enumerate(specs)]
    config = StandIn(kv_cache_groups=layers, num_blocks=9)
    every: dict[str, Any] = dict.fromkeys(NEEDED) | {"attn_groups": [[layer] for layer in layers]}
    every |= {"device": torch.device("cuda"), "supports_mm_inputs": False, "kv_cache_config": config}
    return StandIn(**every | {"model_config": StandIn(enable_prompt_embeds=False)} | changes)


class ModelRunner:
    def initialize_kv_cache(self):
        return find_caller("initialize_kv_cache", "execute_model")

    def execute_model(self):
        raise NotImplementedError


def test_the_runner_that_samples_after_the_connector_is_the_one_whose_connector_is_no_object_of_its_own():
    assert Runner(made(_kernel_block_sizes=[16])).samples_last
    assert not Runner(made(kernel_block_sizes=[16], kv_connector="calls")).samples_last


def test_the_runner_is_found_up_the_stack_and_what_is_missing_is_named():
    runner = ModelRunner()
    assert runner.initialize_kv_cache() is runner
    with pytest.raises(Unsupported, match="initialize_kv_cache and execute_model"):
        find_caller("initialize_kv_cache", "execute_model")
    lacking = made()
    del lacking.model
    with pytest.raises(Unsupported, match="has no model, _kernel_block_sizes or kernel_block_sizes;"):
        Runner(lacking)


COMMON: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
LATENT, WINDOW = MLAAttentionSpec(**COMMON), SlidingWindowMLASpec(sliding_window=128, **COMMON)
STATE = MambaSpec(block_size=16, shapes=((3, 4), (2, 8, 8)), dtypes=(torch.bfloat16, torch.bfloat16))
REFUSED = {
    "MLAAttentionSpec, not a key and a value of each token": replace(
        LATENT, head_size=512, tokens_per_state=2, model_version="deepseek_v4", alignment=512
    ),
    "a recurrent state, and none of blocks that are full": STATE,
    "a recurrent state for each token that speculation proposes": replace(
        STATE, mamba_cache_mode="align", num_speculative_blocks=1
    ),
    r"ring of keys that are still being compressed \(CircularBufferSpec\)": CircularBufferSpec(**COMMON),
    "a window that vLLM computes anew behind each reused prefix": replace(WINDOW, bounded_replay=True),
    "SinkFullAttentionSpec, not a key": SinkFullAttentionSpec(sink_len=4, **COMMON),
}


@pytest.mark.parametrize("why", REFUSED)
def test_kv_that_is_not_that_of_each_token_is_refused(why):
    assert set(Runner(made([LATENT, WINDOW], kernel_block_sizes=[16, 16])).layers) == {"layers.0", "layers.1"}
    runner = Runner(made([LATENT, REFUSED[why]], kernel_block_sizes=[16, 16]))
    with pytest.raises(Unsupported, match=f"layers.1 keeps .*{why}.*; the model is served without reuse"):
        runner.layers  # noqa: B018


def test_states_that_blocks_hold_are_told_from_the_kv_of_tokens_and_do_not_do_alone():
    """Kimi Linear: three layers with a state for each with a latent."""
    state = replace(STATE, mamba_cache_mode="align")
    runner = Runner(made([state, state, LATENT, state], kernel_block_sizes=[16] * 4))
    assert set(runner.layers) == {"layers.2"} and set(runner.recurrent) == {"layers.0", "layers.1", "layers.3"}
    assert not {table for table, _ in runner.layers.values()} & {table for table, _ in runner.recurrent.values()}
    with pytest.raises(Unsupported, match="all layers keep a recurrent state"):
        Runner(made([state, state], kernel_block_sizes=[16] * 2)).layers  # noqa: B018
