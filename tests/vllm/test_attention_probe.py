"""The operators that a probe launches in a layer of a GPU; what it finds, ``test_engine_models`` has."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blendhub import Span
from blendhub.contracts import AttentionRules, PagedLayer
from blendhub.core.layout import KVLayout
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.vllm.model.attention_probe import AttentionProbe, AttentionQuery, ProbeAttention
from blendhub.vllm.model.engine_model import EngineModel, GroupAttention
from blendhub.vllm.model.own_layers import OwnAttention, _attend_to_latent
from blendhub.vllm.model.recompute_set import RequestTokens
from tests.stand_in import Anything, StandIn
from tests.vllm.interpreted_kernels import CudaDevice, CudaOptions, attention, kernels

MOST = 8
"""The most operators in a layer."""
N_STORED, N_ASKING = 100, 12
PROBE = ["attend_chosen", "merge_parts", "add_received"]
RESERVE_MEMORY = {"aten::empty", "aten::new_empty"}
GQA = AttentionRules(8, 0.1), KVLayout(layers=1, kv_heads=2, key_dim=64, value_dim=64, dtype="bfloat16")
MLA = (
    AttentionRules(16, 0.1, latent=512),
    KVLayout(layers=1, kv_heads=1, key_dim=576, value_dim=0, dtype="bfloat16"),
)


class Launches(TorchDispatchMode):
    """Counts operators that a GPU runs: views, and what reserves memory only, are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func.is_view or func._schema.name in RESERVE_MEMORY):
            self.names.append(func._schema.name)
        return func(*args, **kwargs or {})


class Kernel(NamedTuple):
    """Is launched, and computes nothing."""

    name: str
    launched: list[str]

    def __getitem__(self, grid):
        return lambda *given, **constants: self.launched.append(self.name)


@pytest.fixture
def launches(monkeypatch):
    """Also counts our kernels."""
    counted = Launches()
    for module, names in {kernels: ["copy_tokens"], attention: PROBE}.items():
        for name in names:
            monkeypatch.setattr(module, name, Kernel(name, counted.names))
    return counted


class Model(Anything):
    """A model of one layer, which attends on the device."""

    layer_names, tables, block_sizes, page_sizes, device = ["layer"], {"layer": 0}, (16,), {"layer": 16}, "cpu"
    n_own_layers = 1
    begin_attention = EngineModel.begin_attention

    def slots_of_tables(self, chosen):
        return [self.to_device(chosen.slots(16))]

    def to_device(self, numbers):
        return torch.from_numpy(numbers)

    def __init__(self, rules: AttentionRules, layout: KVLayout) -> None:
        shape = (9, 16, 576) if rules.latent else (9, layout.kv_heads, 16, 128)
        format: Any = "latent" if rules.latent else "packed_heads"
        device = CudaDevice(CudaOptions(), lambda place: DeferredRuntime())
        device.attach([PagedLayer("layer", format, (torch.zeros(shape, dtype=torch.bfloat16),))], 16, layout)
        made = device.attention([rules], torch.bfloat16)
        assert made
        self.attention = [GroupAttention(["layer"], made)]


def probe_of(rules, layout):
    probe: Any = object.__new__(AttentionProbe)
    probe.model, probe.last, probe.counted, probe.rules = Model(rules, layout), 1, {"layer"}, {"layer": rules}
    probe.model.layer_names = ["layer", "the last one"]
    stored, asking = Span(0, N_STORED), Span(N_STORED, N_STORED + N_ASKING)
    request = RequestTokens(np.arange(asking.end, dtype=np.uint32), (np.arange(8),), [asking])
    return ProbeAttention(probe, [AttentionQuery(request, [stored])])


def of_width(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_a_layer_launches_few_operators(launches):
    layer, probe = StandIn(layer_name="layer"), probe_of(*GQA)
    query, output, keys = of_width(N_ASKING, 8, 64), of_width(N_ASKING, 8, 64), of_width(N_ASKING, 2, 64)
    launches.names.clear()
    with launches:
        OwnAttention(None, probe).forward(layer, query, keys, keys, None, None, output)
    assert launches.names == PROBE


def test_a_layer_with_mla_launches_few_operators(launches):
    layer = StandIn(layer_name="layer", num_heads=16, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512)
    layer.v_head_dim, layer.W_UK_T, layer.W_UV = 128, of_width(16, 128, 512), of_width(16, 512, 128)
    query, latent, rotated = of_width(N_ASKING, 16, 192), of_width(N_ASKING, 512), of_width(N_ASKING, 1, 64)
    probe, output = probe_of(*MLA), of_width(N_ASKING, 16 * 128)
    launches.names.clear()
    with launches:
        _attend_to_latent(layer, probe, query, latent, rotated, None, None, output)
    assert "add_received" in launches.names and len(launches.names) <= MOST, launches.names
