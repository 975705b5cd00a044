"""What ``Ascend`` does with vllm-ascend's own classes; ``test_platform.py`` runs this with the Python of vLLM 0.23."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.ascend import strict_npu  # noqa: F401  (before vllm_ascend)

import vllm_ascend.ops  # noqa: F401  # isort: skip  (before the others, which it imports in the one order that works)
from blendhub_ascend.vllm.platform import Ascend
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
from blendhub.vllm.model.platform import keeps_latent
from blendhub.vllm.model.rotary import rotated, rotations_of

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


def settings(layer, role="kv_both", chunked=True):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        compilation_config=SimpleNamespace(static_forward_context={layer.layer_name: layer}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


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


def platform(layer, specs=(FULL,), **changes):
    """``specs``: that of each block table."""
    groups = [[SimpleNamespace(kv_cache_spec=spec)] for spec in specs]
    runner = SimpleNamespace(model=torch.nn.Identity(), _has_sinks=False, attn_groups=groups)
    return Ascend(runner, settings(layer, **changes))


def computed_by_mla(n):
    table = torch.rand(2, n, 1, 1, 64).bfloat16()
    return torch.randn(n, 1, 1, 576).bfloat16(), table[0], table[1]


def test_the_hook_finds_what_mla_writes_and_nothing_is_written():
    layer, n = mla_layer(), 150
    given, slots = computed_by_mla(n), torch.randperm(3 * TOKENS)[:n].to(torch.int32)
    name, find = platform(layer).write_hook(layer)
    assert name == "exec_kv_prefill"
    keys, values = find(*given, layer.kv_cache, slots)
    assert not any(pages.any() for pages in layer.kv_cache)
    layer.impl.exec_kv_prefill(*given, layer.kv_cache, slots)
    latent, rotated = (pages.flatten(0, 1)[slots.long()] for pages in layer.kv_cache)
    assert keys.equal(rotated) and values.equal(latent)


@pytest.mark.parametrize("layer", [dense_layer(), mla_layer()], ids=["dense", "mla"])
def test_what_is_written_is_found_in_the_pages(layer):
    one, n = platform(layer), 150
    model: Any = SimpleNamespace(
        layer_names=[layer.layer_name],
        layer=lambda name: layer,
        page_size_of=lambda name: TOKENS,
        table_of=lambda name: 0,
        block_sizes=(TOKENS,),
        config=settings(layer),
        keeps_latent=lambda index: keeps_latent(layer),
    )
    (pages,) = pages_of(model, layer_groups(model, 256))
    layout = pages.layout
    assert pages.paged.format == "split"
    assert layout.key_dim == (64 if keeps_latent(layer) else 128)
    keys, values = (torch.randn(n, 1, width).bfloat16() for width in (layout.key_dim, layout.value_dim))
    slots = torch.randperm(3 * TOKENS)[:n]
    one.write(layer, keys, values, slots)
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


def common(spans):
    lengths = torch.tensor([end - start for start, end in spans])
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
    ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(spans),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=torch.zeros(len(spans), 2, dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int32),
    )


class Group:
    """vLLM's, of which a platform needs the builder only."""

    def __init__(self):
        model = SimpleNamespace(max_model_len=256, runner_type="generate", use_mla=False)
        self.builder = made(
            AscendAttentionMetadataBuilder,
            device=torch.device("cpu"),
            model_config=model,
            kv_cache_spec=None,
            speculative_config=None,
            decode_threshold=1,
            attn_mask_builder=SimpleNamespace(get_attention_mask=lambda *given: "mask"),
        )

    def get_metadata_builder(self):
        return self.builder


def test_runs_are_prefills_that_read_the_pages_even_those_of_one_token():
    one, group = platform(dense_layer()), Group()
    one.prepare_group(group, Group())
    built = one.build(group, common([(0, 1), (7, 8), (20, 120)]))
    assert built.attn_state is AscendAttentionState.ChunkedPrefill
    assert (built.num_decodes, built.num_prefills) == (0, 3)
    assert built.actual_seq_lengths_q == [1, 2, 102] and built.seq_lens_list == [1, 8, 120]


def test_a_forward_leaves_the_buffers_of_the_step_as_they_were(monkeypatch):
    """A step's metadata are views of them, made before BlendHub's forward inside of the step."""
    names = [(rotary_embedding, name) for name in ("_cos", "_sin", "_cos_mla", "_sin_mla", "_cos_slice", "_sin_slice")]
    names.append((ascend_forward_context, "_reserved_mc2_mask"))
    for module, name in names:
        monkeypatch.setattr(module, name, torch.zeros(1, 64, 1, 8) if name != "_reserved_mc2_mask" else torch.zeros(64))
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
    with one.forward_context({}, None, ids, ids, {}):
        assert rotary_embedding._cos_slice.shape[1] == 5 and rotary_embedding._cos_slice.any()
    after = [getattr(module, name) for module, name in names]
    assert all(one is other for one, other in zip(after, theirs, strict=True))
    assert not any(one.any() for one in theirs)
    assert not any(one is other for one, other in zip(inside[:4], theirs, strict=False))


@pytest.mark.parametrize(
    "layer, changes, words",
    [
        (dense_layer(AscendC8AttentionBackendImpl), {}, "C8"),
        (dense_layer(type("AscendFAImpl", (), {})), {}, "FA3"),
        (dense_layer(type("AscendAttentionBackendImpl310", (), {})), {}, "310P"),
        (dense_layer(type("AscendSFAImpl", (), {})), {}, "SFA"),
        (dense_layer(type("AscendDSAImpl", (), {})), {}, "DSA"),
        (dense_layer(type("AscendNewImpl", (), {})), {}, "AscendNewImpl is not known"),
        (mla_layer(fa_quant_layer=True), {}, "FA quantisation"),
        (mla_layer(), {"role": "kv_consumer"}, "MLAPO"),
        (mla_layer(), {"chunked": False}, "chunked prefill"),
    ],
)
def test_what_is_not_served_is_refused_with_a_sentence(layer, changes, words):
    with pytest.raises(Unsupported, match=words):
        platform(layer, **changes)


@pytest.mark.parametrize(
    "option", ["enable_kv_nz", "enable_hamming_sparse", "enable_sp_by_pass", "enable_flashcomm2_parallel_size"]
)
def test_options_that_are_not_served_are_refused_with_their_key(options, option):
    setattr(options, option, 2)
    with pytest.raises(Unsupported, match=f"additional_config.{option} "):
        platform(dense_layer())


@pytest.mark.parametrize("specs", [[WINDOW], [FULL, WINDOW]], ids=["window", "tables"])
def test_attention_windows_are_refused(specs):
    with pytest.raises(Unsupported, match="--disable-hybrid-kv-cache-manager"):
        platform(dense_layer(), specs)


def test_the_second_runner_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(Unsupported, match="VLLM_USE_V2_MODEL_RUNNER is set"):
        platform(dense_layer())


def test_the_options_are_vllm_ascends(options):
    source = Path(ascend_config.__file__).read_text()
    assert all(f"self.{name}" in source for name in vars(options))


@pytest.mark.parametrize(
    "pages, words",
    [
        ((torch.zeros(3, TOKENS, 1, 128),) * 3, "3 tensors"),
        ((torch.zeros(3, TOKENS, 1, 128), torch.zeros(3, TOKENS, 2, 128)), "2 tensors of the shapes"),
        ((torch.zeros(3, TOKENS, 1, 128, dtype=torch.int8),) * 2, "quantised KV"),
        ((torch.zeros(3, 64, 1, 128),) * 2, "pages of 64 tokens"),
    ],
)
def test_other_pages_are_refused(pages, words):
    layer = dense_layer()
    layer.kv_cache = list(pages)
    model: Any = SimpleNamespace(
        layer_names=["layers.0"],
        layer=lambda name: layer,
        page_size_of=lambda name: TOKENS,
        keeps_latent=lambda index: False,
    )
    with pytest.raises(Unsupported, match=words):
        possible_pages(model, 0)
