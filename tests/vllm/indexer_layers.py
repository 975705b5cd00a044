"""A model with an indexer (DeepSeek V3.2) in a process of its own: ``python -m tests.vllm.indexer_layers DTYPE``.

vLLM's are the layers of the indexer, what each layer keeps, the arrangement of the pages, and the kernel that writes
them, in Triton's interpreter. The layers of attention are stand-ins, and so is, in plain torch, the kernel that gathers
the indexer's keys. There is no forward.
"""

from tests.vllm import kernels_in_interpreter  # noqa: F401  # isort: skip  # before vLLM

import itertools
import json
import sys
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from vllm import _custom_ops as ops
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v32.common.kernels import fused_norm_rope
from vllm.utils import deep_gemm
from vllm.v1.attention.backend import MLAAttentionImpl
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, customize_attention_spec, prepare_kernel_block_sizes

from blendhub import Span
from blendhub.contracts import Segment
from blendhub.core.layout import Namespace, shard_bytes_of
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.vllm.model.checks.model_check import check_model, groups_and_rotations
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.fingerprint import fingerprint
from blendhub.vllm.model.layer_groups import attach, pages_of
from blendhub.vllm.model.upstream import Upstream
from blendhub.vllm.scheduler.blocks.block_tables import BlockTables
from blendhub.vllm.worker.layer_copies import LayerCopies
from blendhub.vllm.worker.start.worker_start import compile_kernels
from tests.stand_in import StandIn
from tests.vllm.played_engine import played_engine, text
from tests.vllm.played_worker import SideDevice, worker_of
from tests.vllm.stand_in_model import config_of, rotary
from tests.vllm.two_ranks import ALONE

TOKENS, CHUNK, MEMORY = 100, 32, 2**22
LATENT, ROTATED, INDEX = 512, 64, 128


def gather(cache, keys, scales, block_table, ends):
    """Address a page as ``cp_gather_indexer_k_quant_cache`` in vLLM's ``cache_kernels.cu`` does, for one request."""
    n, width = cache.shape[1], keys.shape[1]
    for token in range(int(ends[1])):
        page, at = cache[block_table[0, token // n]].flatten(), token % n
        keys[token] = page[at * width :][:width]
        scales[token] = page[n * width + at * scales.shape[1] :][: scales.shape[1]]


def gather_strips(cache, keys, scales, block_table, ends):
    """Take each token's key and scale from one place, where the kernel that writes does not put them."""
    keys[:], scales[:] = cache[0].split_with_sizes([keys.shape[1], scales.shape[1]], -1)


def write(kv_cache, cache_dtype, at, slots, latent, rotated, index_pages=None, index_keys=None):
    """vLLM's kernel behind the projections of a layer, for tokens at these positions: it writes a latent, and maybe the
    key of an indexer."""
    n, angles = len(at), torch.rand(TOKENS, ROTATED, generator=torch.Generator().manual_seed(5))
    fused_norm_rope(
        at, torch.zeros(n, 16), torch.ones(16), 1e-6, latent, torch.ones(LATENT), 1e-6, rotated, angles,
        index_keys, torch.ones(INDEX), torch.zeros(INDEX), 1e-6, angles, torch.zeros(n, 8, dtype=torch.int32),
        slot_mapping=slots, indexer_slot_mapping=slots, indexer_k_cache=index_pages, mla_kv_cache=kv_cache,
        mla_kv_cache_dtype=cache_dtype, has_indexer=index_keys is not None,
    )  # fmt: skip


class Impl(MLAAttentionImpl):
    __init__: Any = lambda *given: None
    forward_mha = forward_mqa = __init__

    def do_kv_cache_update(self, latent, rotated, pages, slots, cache_dtype, scale):
        if cache_dtype == "auto":
            pages[slots // pages.shape[1], slots % pages.shape[1]] = torch.cat([latent, rotated[:, 0]], -1)
        else:
            write(pages, cache_dtype, torch.zeros_like(slots), slots, latent, rotated[:, 0])


class Engine:
    """A model of three layers, of which the last one takes the tokens that the indexer of the one before has picked."""

    names: ClassVar = [f"model.layers.{number}.self_attn.attn" for number in range(3)]
    indexers: ClassVar = [f"model.layers.{number}.self_attn.indexer.k_cache" for number in range(2)]

    def __init__(self, cache_dtype: Any, block_size: int, layout: str) -> None:
        self.block_size, self.cache_dtype = block_size, cache_dtype
        config = VllmConfig(cache_config=CacheConfig(block_size=block_size, cache_dtype=cache_dtype))
        config.cache_config.kv_cache_layout = layout
        config.model_config = config_of().model_config
        config.model_config.dtype = torch.bfloat16
        layers = config.compilation_config.static_forward_context
        attention = StandIn(
            impl=Impl(), kv_cache_dtype=cache_dtype, head_size=LATENT + ROTATED, num_kv_heads=1, kv_lora_rank=LATENT,
            qk_rope_head_dim=ROTATED, sliding_window=None, indexer=None, non_causal_multi_token_decode=False,
            _k_scale=torch.ones(()), get_attn_backend=lambda: FlashMLASparseBackend,
        )  # fmt: skip
        layers |= {name: StandIn(**vars(attention)) for name in self.names}
        module = torch.nn.Module()
        module.rotary = rotary(width=ROTATED)
        with set_current_vllm_config(config):
            of_indexer: dict[str, Any] = {"dtype": torch.uint8, "cache_config": config.cache_config}
            module.caches = torch.nn.ModuleList(
                DeepseekV32IndexerCache(INDEX + 4, prefix=name, **of_indexer) for name in self.indexers
            )
            specs: dict[str, Any] = {name: MLAAttention.get_kv_cache_spec(layers[name], config) for name in self.names}
            specs |= {name: layers[name].get_kv_cache_spec(config) for name in self.indexers}
            specs = {name: customize_attention_spec(layers[name].get_attn_backend(), specs[name]) for name in specs}
            blocks = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), MEMORY)
        groups = [
            AttentionGroup(layers[of[0]].get_attn_backend(), of, specs[of[0]], 0) for of in (self.indexers, self.names)
        ]
        (size,) = prepare_kernel_block_sizes(blocks, [groups])
        for group in groups:  # the builders themselves need a GPU
            group.metadata_builders = [StandIn(kv_cache_spec=group.kv_cache_spec.copy_with_new_block_size(size))]
        kept = allocate_kv_cache(blocks, torch.device("cpu"), KVCacheLayout[layout], [size])
        for name, pages in kept.items():
            layers[name].kv_cache = pages.squeeze(1)
        self.memory = torch.empty(0, dtype=torch.uint8).set_(next(iter(kept.values())).untyped_storage())
        runner = StandIn(
            device=torch.device("cpu"), get_model=lambda: module, model=module, attn_groups=[groups],
            kv_cache_config=blocks, kernel_block_sizes=[size], supports_mm_inputs=False,
            model_config=StandIn(enable_prompt_embeds=False),
        )  # fmt: skip
        self.layers, self.model = layers, EngineModel(runner, config, Upstream())
        self.groups, self.rotations = groups_and_rotations(self.model, CHUNK)

    def forget(self) -> torch.Tensor:
        """What stands in the memory from now on, of which no byte is that of KV."""
        return self.memory.copy_(torch.arange(len(self.memory)) % 253).clone()

    def compute(self, blocks: np.ndarray, span: Span) -> None:
        """Write the KV of these tokens of the one prompt that there is."""
        random = torch.Generator().manual_seed(7)
        at = torch.arange(span.start, span.end)
        slots = torch.from_numpy(blocks)[at // self.block_size] * self.block_size + at % self.block_size
        for name, indexer in itertools.zip_longest(self.names, self.indexers):
            drawn = [torch.randn(TOKENS, n, generator=random).bfloat16()[at] for n in (LATENT, ROTATED, INDEX)]
            index = (self.layers[indexer].kv_cache, drawn.pop()) if indexer else ()
            write(self.layers[name].kv_cache, self.cache_dtype, at, slots, *drawn[:2], *index)


def copied(saving: Any, source: Engine, loading: Any, target: Engine) -> bool:
    """Whether what one engine saves and another loads behind its own prefix is, byte for byte, what that one computes,
    and nothing else is written."""
    layouts, own = [group.layout for group in source.groups], 17
    assert layouts == [group.layout for group in target.groups], "engines with other blocks share nothing"
    shard, starts = shard_bytes_of(layouts), range(0, TOKENS, CHUNK)
    arena = np.zeros(len(starts) * shard, np.uint8)
    for device, engine in ((saving, source), (loading, target)):
        attach(device, engine.groups, pages_of(engine.model, engine.groups))
        device.pin(arena)
    segments = [Segment(Span(at, min(at + CHUNK, TOKENS)), at // CHUNK * shard, 0, at) for at in starts]
    blocks, others = np.array([3, 1]), np.array([4, 2])
    source.compute(blocks, Span(0, TOKENS))
    LayerCopies(saving, source.groups).save(segments, [blocks]).wait()
    before = target.forget()
    target.compute(others, Span(own, TOKENS))
    expected = target.memory.clone()
    target.memory.copy_(before)
    LayerCopies(loading, target.groups).load(segments, [others], own).all.wait()
    return target.memory.equal(expected)


def served(engine: Engine) -> bool:
    """Whether a worker that has stored a prompt in a hub loads it into other blocks, byte for byte."""
    layouts = tuple(group.layout for group in engine.groups)
    namespace = Namespace(model="m", layout=layouts[0], other_layouts=layouts[1:])
    tables, prompt = BlockTables((engine.block_size,), (None,)), text(0, TOKENS)
    support: dict[str, Any] = {"layouts": layouts, "blends": False, "namespace": namespace, "tables": tables}
    with played_engine(rank=-1, **support) as played, worker_of(played, SideDevice(), engine.model) as worker:
        engine.forget()
        engine.compute(np.array(played.blocks.blocks), Span(0, TOKENS))
        worker.store("first", prompt)
        before = engine.forget()
        worker.arrive("second", [*prompt, 1], first_block=9)
        worker.until_loaded("second")
        loaded = engine.memory.clone()
        engine.memory.copy_(before)
        engine.compute(np.arange(9, 11), Span(0, TOKENS))
        return loaded.equal(engine.memory)


def main(cache_dtype: str) -> dict[str, Any]:
    def on_cpu() -> CpuDevice:
        return CpuDevice(CpuOptions())

    large, packed = Engine(cache_dtype, 128, "LBNHC"), Engine(cache_dtype, 64, "BLHNC")
    model, given = packed.model, (packed.groups, packed.rotations)
    compile_kernels(on_cpu, model, *given)
    interpreted = [CudaDevice(CudaOptions(), lambda place: DeferredRuntime()) for _ in range(2)]
    setattr(ops, "cp_gather_indexer_k_quant_cache", gather)  # noqa: B010
    selector, name = StandIn(probe_layer=1, attended_layers=()), fingerprint(*model.modules)
    found = {
        "layers": model.layer_names,
        "support": msgspec.to_builtins(check_model(model, *given, selector, ALONE).support),
        "why_no_metadata": model._why_no_metadata,
        "copied": [copied(on_cpu(), large, interpreted[0], packed), copied(interpreted[1], packed, on_cpu(), large)],
        "served": served(packed),
    }
    setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: True)  # noqa: B010  # vLLM 0.33 on Blackwell
    found["names"] = [name, fingerprint(*model.modules), fingerprint(torch.nn.Module())]
    setattr(ops, "cp_gather_indexer_k_quant_cache", gather_strips)  # noqa: B010
    found["refusal"] = check_model(model, *given, selector, ALONE).support.reasons
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
