"""What ``Ascend`` does with vllm-ascend's own classes.

``test_engine_ascend.py`` runs this with the Python of vLLM 0.23.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.ascend import strict_npu  # noqa: F401  (before vllm_ascend)

import vllm_ascend.ops  # noqa: F401  # isort: skip  (before the others, which it imports in the one order that works)
from blendhub_ascend.vllm.platform import Ascend
from blendhub_ascend.vllm.refusals import OPTIONS
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm_ascend import ascend_config, ascend_forward_context
from vllm_ascend.attention.attention_v1 import (
    AscendAttentionBackend,
    AscendAttentionBackendImpl,
    AscendAttentionMetadataBuilder,
    AscendAttentionState,
    AscendC8AttentionBackendImpl,
)
from vllm_ascend.attention.mla_v1 import AscendMLABackend, AscendMLAImpl
from vllm_ascend.ops import rotary_embedding

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.layer_groups import layer_groups, pages_of
from blendhub.vllm.model.pages import possible_pages, read
from blendhub.vllm.model.rotary import rotated, rotations_of
from blendhub.vllm.model.runner import Inputs

SHAPE: dict[str, Any] = {"block_size": 128, "num_kv_heads": 1, "head_size": 128, "dtype": torch.bfloat16}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=256)
TOKENS = 128
"""The number of tokens of a page."""


def made(cls, **content):
    """An ``impl`` without the model around it."""
    impl = cls.__new__(cls)
    impl.__dict__.update(content)
    return impl


def dense_layer(cls=AscendAttentionBackendImpl):
    pages = tuple(torch.zeros(3, TOKENS, 1, 128, dtype=torch.bfloat16) for _ in range(2))
    impl = made(cls, attn_type="decoder", key_cache=None, value_cache=None)
    return SimpleNamespace(
        layer_name="layers.0", impl=impl, kv_cache=pages, get_attn_backend=lambda: AscendAttentionBackend
    )


def mla_layer(**changes):
    norm = SimpleNamespace(weight=torch.rand(512).bfloat16(), variance_epsilon=1e-6)
    content = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_kv_heads": 1, "kv_a_layernorm": norm}
    impl = made(AscendMLAImpl, **content | {"fa_quant_layer": False} | changes)
    pages = tuple(torch.zeros(3, TOKENS, 1, width, dtype=torch.bfloat16) for width in (512, 64))
    return SimpleNamespace(layer_name="layers.0", impl=impl, kv_cache=pages, get_attn_backend=lambda: AscendMLABackend)


@pytest.fixture(autouse=True)
def options(monkeypatch):
    """vllm-ascend's own settings."""
    given = SimpleNamespace(
        enable_kv_nz=False,
        enable_hamming_sparse=False,
        enable_sp_by_pass=False,
        enable_flashcomm2_parallel_size=0,
        xlite_graph_config=SimpleNamespace(enabled=False),
    )
    monkeypatch.setattr("blendhub_ascend.vllm.refusals.get_ascend_config", lambda: given)
    return given


def settings(layer, role="kv_both", chunked=True):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        compilation_config=SimpleNamespace(static_forward_context={layer.layer_name: layer}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def platform(layer, specs=(FULL,), **changes):
    """``specs``: that of each block table."""
    groups = [[SimpleNamespace(kv_cache_spec=spec)] for spec in specs]
    runner = SimpleNamespace(model=torch.nn.Identity(), _has_sinks=False, attn_groups=groups)
    return Ascend(runner, settings(layer, **changes))


def model_of(layer) -> Any:
    return SimpleNamespace(
        layer_names=[layer.layer_name],
        layer=lambda name: layer,
        page_sizes={layer.layer_name: TOKENS},
        tables={layer.layer_name: 0},
        block_sizes=(TOKENS,),
        config=settings(layer),
    )


def test_the_hook_finds_what_mla_writes_and_nothing_is_written():
    layer, n = mla_layer(), 150
    cos, sin = torch.rand(2, n, 1, 1, 64).bfloat16()
    given, slots = (torch.randn(n, 1, 1, 576).bfloat16(), cos, sin), torch.randperm(3 * TOKENS)[:n].to(torch.int32)
    name, find = platform(layer).write_hook(layer)
    assert name == "exec_kv_prefill"
    keys, values = find(*given, layer.kv_cache, slots)
    assert not any(pages.any() for pages in layer.kv_cache)
    layer.impl.exec_kv_prefill(*given, layer.kv_cache, slots)
    latent, rotated = (pages.flatten(0, 1)[slots.long()] for pages in layer.kv_cache)
    assert keys.equal(rotated) and values.equal(latent)


@pytest.mark.parametrize("layer, width", [(dense_layer(), 128), (mla_layer(), 64)], ids=["dense", "mla"])
def test_what_is_written_is_found_in_the_pages(layer, width):
    (pages,) = pages_of(model_of(layer), layer_groups(model_of(layer), 256))
    assert pages.paged.format == "split" and pages.layout.key_dim == width
    slots = torch.randperm(3 * TOKENS)[:150]
    keys, values = (torch.randn(150, 1, width).bfloat16() for width in (width, pages.layout.value_dim))
    platform(layer).write(layer, keys, values, slots)
    found = read(pages, slots.to(torch.int32))
    assert found[0].equal(keys) and found[1].equal(values)


def test_a_rotation_of_mla_is_found_though_its_module_names_the_other_pairing():
    """``npu_kv_rmsnorm_rope_cache`` gathers even and odd items before it turns halves."""
    with set_current_vllm_config(VllmConfig()):
        module = RotaryEmbedding(64, 64, 4096, 10000.0, False, torch.float32)
    layer, old, new = mla_layer(), torch.tensor([3]), torch.tensor([1234])
    angles = module._compute_cos_sin_cache()

    def keys_at(position):
        cos, sin = (one.repeat(1, 2).view(1, 1, 1, 64).bfloat16() for one in angles[position].chunk(2, -1))
        torch.manual_seed(1)
        rest = torch.randn(1, 1, 1, 576).bfloat16()
        return layer.impl.exec_kv_prefill(rest, cos, sin, layer.kv_cache, torch.zeros(1, dtype=torch.int32))[0][:, 0]

    errors = {
        rotation.neox: float((rotated(keys_at(old), rotation, old, new) - keys_at(new).float()).abs().max())
        for rotation in rotations_of(torch.nn.ModuleList([module]), 64, 4096)
    }
    assert errors[True] < 0.05 < 0.5 < errors[False]


def group():
    """vLLM's, of which a platform needs the builder only."""
    model = SimpleNamespace(max_model_len=256, runner_type="generate", use_mla=False)
    builder = made(
        AscendAttentionMetadataBuilder,
        device=torch.device("cpu"),
        model_config=model,
        kv_cache_spec=None,
        speculative_config=None,
        decode_threshold=1,
        attn_mask_builder=SimpleNamespace(get_attention_mask=lambda *given: "mask"),
    )
    return SimpleNamespace(get_metadata_builder=lambda: builder)


def test_runs_are_prefills_that_read_the_pages_even_those_of_one_token():
    one, own = platform(dense_layer()), group()
    one.prepare_group(own, group())
    starts, ends = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 1, 2, 102], [1, 8, 120]))
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=3,
        num_actual_tokens=102,
        max_query_len=100,
        max_seq_len=120,
        block_table_tensor=torch.zeros(3, 2, dtype=torch.int32),
        slot_mapping=torch.zeros(102, dtype=torch.int32),
    )
    built = one.build(own, common)
    assert built.attn_state is AscendAttentionState.ChunkedPrefill
    assert (built.num_decodes, built.num_prefills) == (0, 3)
    assert built.actual_seq_lengths_q == [1, 2, 102] and built.seq_lens_list == [1, 8, 120]


def test_a_forward_leaves_the_buffers_of_the_step_as_they_were(monkeypatch):
    """A step's metadata are views of them, made before BlendHub's forward inside of the step."""
    names = [(rotary_embedding, name) for name in ("_cos", "_sin", "_cos_mla", "_sin_mla", "_cos_slice", "_sin_slice")]
    names.append((ascend_forward_context, "_reserved_mc2_mask"))
    for module, name in names:
        monkeypatch.setattr(module, name, torch.zeros(1, 64, 1, 8) if module is rotary_embedding else torch.zeros(64))
    monkeypatch.setattr(rotary_embedding, "_cos_sin_cache", torch.rand(64, 8))
    theirs = [getattr(module, name) for module, name in names]
    inside = []

    def context(*given, **named):
        inside.extend(getattr(module, name) for module, name in names)
        ascend_forward_context._reserved_mc2_mask[:5] = 1
        rotary_embedding._cos_mla[:] = 1
        rotary_embedding._sin_mla[:] = 1
        return monkeypatch.context()

    monkeypatch.setattr(ascend_forward_context, "set_ascend_forward_context", context)
    one, ids = platform(dense_layer()), torch.arange(5)
    with one.forward_context({}, None, Inputs(ids, ids), {}):
        assert rotary_embedding._cos_slice.shape[1] == 5 and rotary_embedding._cos_slice.any()
    after = [getattr(module, name) for module, name in names]
    assert all(one is other for one, other in zip(after, theirs, strict=True))
    assert not any(one.any() for one in theirs)
    assert not any(one is other for one, other in zip(inside[:4], theirs, strict=False))


@pytest.mark.parametrize(
    "layer, changes, words",
    [
        (dense_layer(AscendC8AttentionBackendImpl), {}, "C8"),
        (dense_layer(type("AscendAttentionBackendImpl310", (), {})), {}, "310P"),
        (dense_layer(type("AscendNewImpl", (), {})), {}, "AscendNewImpl is not known"),
        (mla_layer(fa_quant_layer=True), {}, "FA quantisation"),
        (mla_layer(), {"role": "kv_consumer"}, "MLAPO"),
        (mla_layer(), {"chunked": False}, "chunked prefill"),
        (dense_layer(), {"specs": [WINDOW]}, "--disable-hybrid-kv-cache-manager"),
        (dense_layer(), {"specs": [FULL, WINDOW]}, "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_what_is_not_served_is_refused_with_a_sentence(layer, changes, words):
    with pytest.raises(Unsupported, match=words):
        platform(layer, **changes)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_are_not_served_are_refused_with_their_key(options, option, monkeypatch):
    assert f"self.{option}" in Path(ascend_config.__file__).read_text()
    setattr(options, option, 2)
    with pytest.raises(Unsupported, match=f"additional_config.{option} "):
        platform(dense_layer())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(Unsupported, match="VLLM_USE_V2_MODEL_RUNNER is set"):
        platform(dense_layer())


def test_other_pages_are_refused():
    page = torch.zeros(3, TOKENS, 1, 128)
    for pages, words in (
        ([page] * 3, "3 tensors"),
        ([page, torch.zeros(3, TOKENS, 2, 128)], "2 tensors of the shapes"),
        ([page.to(torch.int8)] * 2, "quantised KV"),
        ([page[:, :64]] * 2, "pages of 64 tokens"),
    ):
        layer = dense_layer()
        layer.kv_cache = pages
        with pytest.raises(Unsupported, match=words):
            possible_pages(model_of(layer), 0)
