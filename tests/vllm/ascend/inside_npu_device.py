"""The adapter with a model on a device that is neither CPU nor CUDA; ``test_platform.py`` runs this with vLLM 0.23."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.stand_in import StandIn
from tests.vllm.ascend import strict_npu  # noqa: F401  (before vllm_ascend)

import vllm_ascend.ops  # noqa: F401  # isort: skip  (before the others, which it imports in the one order that works)
import torch_npu
from blendhub_ascend.vllm.platform import Ascend
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup
from vllm_ascend.ascend_config import init_ascend_config
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend, AscendAttentionBackendImpl

from blendhub.core.spans import Span
from blendhub.vllm.model.checks.model_check import check_model, groups_and_rotations
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.fingerprint import fingerprint
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.worker.ranks import Ranks
from harness.engines.tiny_model import make_tiny_model
from tests.vllm.ascend.npu_tensors import NPU, NpuMemory, NpuTensor, native

NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


class Event:
    def record(self):
        pass

    synchronize = record


class Layer(torch.nn.Module):
    """vLLM's attention layer, as far as the adapter and the backend read it."""

    num_kv_heads, head_size, _k_scale_float, _v_scale_float = 1, 128, 1.0, 1.0

    def __init__(self, name):
        super().__init__()
        self.layer_name = name
        self.impl = AscendAttentionBackendImpl(2, 128, 128**-0.5, 1, None, None, "auto", None, "decoder", None)
        self.kv_cache = tuple(torch.zeros(4, 128, 1, 128, dtype=torch.bfloat16, device=NPU) for _ in range(2))

    def get_attn_backend(self):
        return AscendAttentionBackend


class Model(torch.nn.Module):
    """Two layers of attention whose keys are rotated."""

    def __init__(self, layers):
        super().__init__()
        self.attention = torch.nn.ModuleList(layers)
        self.rotary = RotaryEmbedding(128, 128, 2048, 10000.0, True, torch.float32)
        self.rotary.cos_sin_cache = self.rotary.cos_sin_cache.to(NPU)
        made = torch.Generator().manual_seed(1)
        self.embedding = (torch.randn(1000, 256, generator=made) * 4).bfloat16().to(NPU)
        self.weights = [
            [(torch.randn(256, width, generator=made) / 8).bfloat16().to(NPU) for width in (256, 128, 128)]
            for _ in layers
        ]

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds):
        hidden = self.embedding[input_ids.long()]
        cos, sin = self.rotary.cos_sin_cache[positions].chunk(2, -1)
        for layer, weights in zip(self.attention, self.weights, strict=True):
            query, key, value = (hidden @ one for one in weights)
            query, key = (rotated(one.view(len(hidden), -1, 128), cos[:, None], sin[:, None]) for one in (query, key))
            output = torch.empty_like(query)
            metadata: Any = get_forward_context().attn_metadata
            value = value.view(len(hidden), -1, 128)
            output = layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata[layer.layer_name], output)
            hidden = hidden + output.flatten(1)
        return hidden


def rotated(one, cos, sin):
    first, second = one.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(one.dtype)


@pytest.fixture(scope="module")
def engine_model(tmp_path_factory):
    tmp_path, monkeypatch = tmp_path_factory.mktemp("engine"), pytest.MonkeyPatch()
    for name in ("_npu_reshape_and_cache", "npu_fused_infer_attention_score"):
        monkeypatch.setattr(torch_npu, name, native(getattr(torch_npu, name)))
    monkeypatch.setattr(torch.npu, "Event", Event)
    widths: dict[str, Any] = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_tiny_model(tmp_path / "wide", num_hidden_layers=2, torch_dtype="bfloat16", **widths)
    config = EngineArgs(str(model), skip_tokenizer_init=True, block_size=128, max_model_len=2048).create_engine_config()
    with set_current_vllm_config(config), NpuMemory(), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        initialize_model_parallel()
        init_ascend_config(config)
        layers = [Layer(name) for name in NAMES]
        config.compilation_config.static_forward_context.update(zip(NAMES, layers, strict=True))
        module = Model(layers)
        spec = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
        group = AttentionGroup(AscendAttentionBackend, NAMES, spec, 0)
        blocks = SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec)
        group.create_metadata_builders(config, NPU, 128)
        runner = SimpleNamespace(
            device=NPU,
            get_model=lambda: module,
            model=module,
            attn_groups=[[group]],
            kv_cache_config=SimpleNamespace(num_blocks=9, kv_cache_groups=[blocks]),
            kernel_block_sizes=[[128]],
            supports_mm_inputs=False,
            model_config=config.model_config,
            _has_sinks=False,
        )
        yield EngineModel(runner, config, Ascend(runner, config))
    monkeypatch.undo()


def test_tensors_of_two_devices_do_not_mix():
    with NpuMemory():
        there = torch.ones(3, device=NPU)
        assert isinstance(there * 2, NpuTensor) and (there * 2).cpu().tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="on npu and on cpu"):
            there + torch.ones(3)


def test_the_checks_at_the_start_pass(engine_model):
    groups, rotations = groups_and_rotations(engine_model, 256)
    check = check_model(
        engine_model, groups, rotations, StandIn(probe_layer=1, attended_layers=()), Ranks(get_tp_group())
    )
    assert check.support.reasons == () and check.support.blends
    assert all(rotation.neox for rotation in check.rotations)
    assert len(fingerprint(engine_model.module)) == 32


def test_a_forward_over_spans_and_a_probe(engine_model):
    tokens, blocks = np.arange(20, 320, dtype=np.uint32), np.array([2, 1, 3], np.int64)
    spans = [Span(0, 140), Span(140, 141), Span(141, 300)]
    hidden = engine_model.forward(RecomputeSet([RequestTokens(tokens, [blocks], spans)]))
    last = RecomputeSet([RequestTokens(tokens, [blocks], [Span(130, 300)])])
    keys, values = engine_model.forward_until(1, last)
    assert {one.device.type for one in (hidden, keys, values)} == {"npu"} and keys.shape == (170, 1, 128)
    engine_model.write(1, keys, values, engine_model.slots(last))
