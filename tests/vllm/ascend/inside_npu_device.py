"""The adapter with a model on a device that is neither CPU nor CUDA.

``test_engine_ascend.py`` runs this with vLLM 0.23.

Tensors of the device ``npu`` have their memory on the CPU: what mixes devices raises, as it would on an NPU. The device
is torch's PrivateUse1, renamed as torch_npu renames it. Nothing is compiled: every operator computes on the CPU tensors
inside, after a check that all of its tensors lie on one device.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

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

from blendhub.vllm.model.checks.model_check import check_model, groups_and_rotations
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.fingerprint import fingerprint
from blendhub.vllm.ranks import Ranks
from harness.engines.tiny_model import make_tiny_model

aten = torch.ops.aten
BETWEEN_DEVICES = (aten.copy_, aten._to_copy, aten.to)
torch.utils.rename_privateuse1_backend("npu")
# What torch needs of any device, for backends that are written in Python.
torch._C._acc.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
torch._C._acc.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())
NPU = torch.device("npu", 0)


class NpuTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, inside):
        layout = {"strides": inside.stride(), "storage_offset": inside.storage_offset(), "dtype": inside.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, **layout, device=NPU)
        made.inside = inside
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator, types, given=(), named=None):
        return compute(operator, given, named or {})


class NpuMemory(TorchDispatchMode):
    """In it, tensors can be made on the device."""

    def __torch_dispatch__(self, operator, types, given=(), named=None):
        return compute(operator, given, named or {})


def compute(operator, given, named):
    tensors = [one for one in tree_flatten((given, named))[0] if isinstance(one, torch.Tensor)]
    on_npu = [one for one in tensors if isinstance(one, NpuTensor)]
    if on_npu and operator.overloadpacket not in BETWEEN_DEVICES:
        for one in tensors:
            # torch takes a number on the CPU for a number.
            if not isinstance(one, NpuTensor) and one.dim():
                raise RuntimeError(f"{operator}: tensors on npu and on {one.device}")
    device, given, named = on_cpu(operator, given, named)
    result = operator(*tree_map(unwrapped, given), **tree_map(unwrapped, named))
    if operator is aten.copy_.default:
        is_npu = isinstance(given[0], NpuTensor)
    else:
        is_npu = torch.device(device).type == "npu" if device is not None else bool(on_npu)
    if not is_npu:
        return result
    known = {id(one.inside): one for one in on_npu}
    return tree_map(lambda one: known[id(one)] if id(one) in known else wrapped(one), result)


def on_cpu(operator, given, named):
    """The device that the operator is asked for, and its arguments with the CPU in that place."""
    names = [one.name for one in operator._schema.arguments]
    if "device" in named:
        return named["device"], given, named | {"device": "cpu"}
    at = names.index("device") if "device" in names else len(given)
    if at >= len(given):
        return None, given, named
    return given[at], (*given[:at], torch.device("cpu"), *given[at + 1 :]), named


def wrapped(value):
    return NpuTensor(value) if isinstance(value, torch.Tensor) and not isinstance(value, NpuTensor) else value


def unwrapped(value):
    return value.inside if isinstance(value, NpuTensor) else value


def native(kernel):
    """An operator of the NPU, which takes nothing but tensors of the NPU."""

    def called(*given, **named):
        tensors = [one for one in tree_flatten((given, named))[0] if isinstance(one, torch.Tensor)]
        if not all(isinstance(one, NpuTensor) for one in tensors):
            raise RuntimeError(f"{kernel.__name__}: a tensor is not on the NPU")
        return tree_map(wrapped, kernel(*tree_map(unwrapped, given), **tree_map(unwrapped, named)))

    return called


NAMES = ["model.layers.0.attn", "model.layers.1.attn"]


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
        self.weights = [(torch.randn(256, 512, generator=made) / 8).bfloat16().to(NPU) for _ in layers]

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds):
        hidden = self.embedding[input_ids.long()]
        cos, sin = self.rotary.cos_sin_cache[positions, None].chunk(2, -1)
        metadata: Any = get_forward_context().attn_metadata
        for layer, weights in zip(self.attention, self.weights, strict=True):
            heads = (hidden @ weights).view(-1, 4, 128)
            first, second = heads[:, :3].float().chunk(2, -1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)
            query, key, value = turned[:, :2].contiguous(), turned[:, 2:], heads[:, 3:]
            output = torch.empty_like(query)
            output = layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata[layer.layer_name], output)
            hidden = hidden + output.flatten(1)
        return hidden


@pytest.fixture(scope="module")
def engine_model(tmp_path_factory):
    tmp_path, monkeypatch = tmp_path_factory.mktemp("engine"), pytest.MonkeyPatch()
    for name in ("_npu_reshape_and_cache", "npu_fused_infer_attention_score"):
        monkeypatch.setattr(torch_npu, name, native(getattr(torch_npu, name)))
    nothing = lambda event: None  # noqa: E731
    monkeypatch.setattr(torch.npu, "Event", type("Event", (), {"record": nothing, "synchronize": nothing}))
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
