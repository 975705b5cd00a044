"""A model with MLA of which some layers have an attention window, on vLLM's CPU build.

No model that vLLM's CPU build serves is such a one, and its attention for MLA has no windows. The layers' KV, the block
tables and the writes into pages are vLLM's; only the attention over them is plain torch.
"""

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonDecodeMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from harness.engines.wide_weights import widen

WINDOW = 64


class Builder(MLACommonMetadataBuilder):
    """Has the queries of every request attend to what the pages hold, as those of one token do."""

    query_len_support = QueryLenSupport.VARLEN
    reorder_batch_threshold = 2**20

    def _build_decode(self, *given: Any, **named: Any) -> MLACommonDecodeMetadata:
        decode: Any = super()._build_decode(*given, **named)
        decode.starts = named["query_start_loc_cpu"].tolist()
        return decode


def attend(impl: Any, query: Any, pages: torch.Tensor, metadata: Any, layer: Any) -> tuple[torch.Tensor, None]:
    query = torch.cat(query, -1) if isinstance(query, tuple) else query
    output = query.new_zeros(*query.shape[:2], impl.kv_lora_rank)
    starts, size, window = metadata.decode.starts, pages.shape[1], layer.sliding_window
    for row, end in enumerate(metadata.decode.seq_lens.tolist()):
        mine = slice(starts[row], starts[row + 1])
        positions = torch.arange(end - mine.stop + mine.start, end)[:, None]
        blocks = metadata.decode.block_table[row, : -(-end // size)].long()
        latents, places = pages[blocks].flatten(0, 1)[:end], torch.arange(end)
        is_seen = (places <= positions) & (places > positions - (window or end + 1))
        scores = torch.einsum("qhd,kd->hqk", query[mine], latents) * impl.scale
        shares = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
        # What vLLM has put into blocks that the window has left may be anything.
        known = latents[:, : impl.kv_lora_rank].masked_fill(~is_seen.any(0)[:, None], 0.0)
        output[mine] = torch.einsum("hqk,kd->qhd", shares, known)
    return output, None


def install() -> None:
    """Have every second layer of a model with MLA have a window, and large weights, in this process."""
    widen()
    described: Any = MLAAttention.get_kv_cache_spec

    def describe(layer: Any, config: Any) -> Any:
        layer.sliding_window = WINDOW if int(layer.layer_name.split(".")[2]) % 2 else None
        return described(layer, config)

    check: Any = CpuPlatform.check_and_update_config

    def check_all_but_steps(cls: type[CpuPlatform], config: Any) -> None:
        """Steps may be smaller than prompts, and vLLM's prefix cache be on, unlike with its attention for CPUs."""
        steps, cache = config.scheduler_config, config.cache_config
        asked = steps.enable_chunked_prefill, steps.max_num_batched_tokens, cache.enable_prefix_caching
        check.__func__(cls, config)
        steps.enable_chunked_prefill, steps.max_num_batched_tokens, cache.enable_prefix_caching = asked

    mla: Any = MLAAttention
    mla.get_kv_cache_spec = describe
    impl: Any = CPUMLAImpl
    impl.forward_mqa = attend
    backend: Any = CPUMLABackend
    backend.get_builder_cls = staticmethod(lambda: Builder)
    setattr(CpuPlatform, "check_and_update_config", classmethod(check_all_but_steps))  # noqa: B010
