"""What BlendHub needs of vLLM's model runners, V1 and V2: both have it, and one that has not is refused by name."""

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.runner import KERNEL_BLOCK_SIZES, NEEDED, Runner, find_caller
from blendhub.vllm.plugin import register
from tests.stand_in import StandIn

RUNNERS = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"


def members(module: str) -> set[str]:
    """Methods of the runner's class, and what they assign to ``self``; read, since only a GPU could run them all."""
    tree = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    names = "GPUModelRunner", "LoRAModelRunnerMixin"
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names)
    methods = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
    stored = (node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return methods | {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def test_both_runners_have_all_that_is_needed_and_the_one_that_samples_after_the_connector_is_told():
    for module, sizes in zip(RUNNERS, KERNEL_BLOCK_SIZES, strict=True):
        assert {*NEEDED, sizes, "initialize_kv_cache", "execute_model"} <= members(module)
    assert "lora_manager" in members("vllm.v1.worker.lora_model_runner_mixin")
    assert "kv_connector" in members(RUNNERS[1]) - members(RUNNERS[0])
    assert Runner(made(_kernel_block_sizes=[16])).samples_last
    assert not Runner(made(kernel_block_sizes=[16], kv_connector="calls")).samples_last


def made(**changes):
    groups, settings = StandIn(kv_cache_groups=["group"], num_blocks=9), StandIn(enable_prompt_embeds=False)
    every: dict[str, Any] = dict.fromkeys(NEEDED) | {"get_model": lambda: "module", "kv_cache_config": groups}
    every |= {"device": torch.device("cuda"), "supports_mm_inputs": False, "model_config": settings}
    return StandIn(**every | changes)


def test_what_a_runner_lacks_is_named():
    lacking = made()
    del lacking.model
    with pytest.raises(Unsupported, match="has no model, _kernel_block_sizes or kernel_block_sizes;"):
        Runner(lacking)


class ModelRunner:
    def initialize_kv_cache(self):
        return find_caller("initialize_kv_cache", "execute_model")

    def execute_model(self):
        raise NotImplementedError


def test_the_runner_is_found_up_the_stack_or_it_is_said_that_there_is_none():
    runner = ModelRunner()
    assert runner.initialize_kv_cache() is runner
    with pytest.raises(Unsupported, match="initialize_kv_cache and execute_model"):
        find_caller("initialize_kv_cache", "execute_model")


BLOCK = 16
COMMON: dict[str, Any] = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
LATENT = MLAAttentionSpec(block_size=BLOCK, **COMMON)
WINDOW = SlidingWindowMLASpec(block_size=BLOCK, sliding_window=128, **COMMON)
STATE = MambaSpec(
    block_size=BLOCK,
    shapes=((3, 4), (2, 8, 8)),
    dtypes=(torch.bfloat16, torch.bfloat16),
    page_size_padded=LATENT.page_size_bytes,
)


def served(layers):
    """A runner with the groups that vLLM makes of these layers with its hybrid allocator."""
    register()
    connector = KVTransferConfig(kv_connector="BlendHubConnector", kv_role="kv_both")
    vllm = VllmConfig(kv_transfer_config=connector, cache_config=CacheConfig(block_size=BLOCK))
    vllm.model_config = MagicMock(max_model_len=131_072, hf_config=None)
    # The layout that can express layers of all sizes.
    vllm.cache_config.kv_cache_layout = "BLHNC"
    groups = get_kv_cache_groups(vllm, {f"layers.{at}": spec for at, spec in enumerate(layers)})
    attention = [
        [StandIn(layer_names=[name], kv_cache_spec=spec) for name, spec in layers_of(group)] for group in groups
    ]
    config = StandIn(kv_cache_groups=groups, num_blocks=9)
    return Runner(made(kernel_block_sizes=[BLOCK] * len(groups), attn_groups=attention, kv_cache_config=config))


def layers_of(group):
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return own.items() if own else [(name, group.kv_cache_spec) for name in group.layer_names]


def test_latents_with_and_without_a_window_have_tables_apart():
    runner = served([LATENT, WINDOW] * 4)
    tables = [{runner.layers[f"layers.{at}"][0] for at in range(first, 8, 2)} for first in (0, 1)]
    assert len(runner.layers) == 8 and not tables[0] & tables[1]


@pytest.mark.parametrize(
    "layers, why",
    [
        (
            [replace(LATENT, head_size=512, tokens_per_state=2, model_version="deepseek_v4", alignment=512)],
            "MLAAttentionSpec, not a key and a value of each token",
        ),
        ([LATENT, STATE], "recurrent state, which is that of a whole prefix"),
        (
            [LATENT, CircularBufferSpec(block_size=BLOCK // 2, **COMMON)],
            r"ring of keys that are still being compressed \(CircularBufferSpec\)",
        ),
        ([LATENT, replace(WINDOW, bounded_replay=True)], "a window that vLLM computes anew behind each reused prefix"),
        ([SinkFullAttentionSpec(block_size=BLOCK, sink_len=4, **COMMON)], "SinkFullAttentionSpec, not a key"),
    ],
    ids=["compressed", "recurrent", "ring", "replayed", "sinks"],
)
def test_kv_that_is_not_that_of_each_token_is_refused(layers, why):
    runner = served(layers)
    with pytest.raises(Unsupported, match=f"{why}.*; the model is served without reuse"):
        runner.layers  # noqa: B018
