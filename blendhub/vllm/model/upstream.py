"""vLLM's own model runners."""

from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.utils import AttentionGroup

from blendhub.vllm.model.platform import Platform, Tensors, WriteHook, keeps_latent
from blendhub.vllm.model.runner import Inputs


class Upstream(Platform):
    def to_device(self, numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        return async_tensor_h2d(numbers, device)

    def slots(self, slots: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        return async_tensor_h2d(slots, device)

    def table_width(self, n_blocks: int, block_size: int) -> int:
        # As wide as vLLM makes it: some kernels read several entries at once.
        return get_block_table_width(n_blocks, block_size)

    def prepare_group(self, own: AttentionGroup, theirs: AttentionGroup) -> None:
        # Since 0.32 vLLM may pack the pages of several layers into a block.
        if hasattr(theirs, "kernel_block_stride"):
            own.kernel_block_stride = theirs.kernel_block_stride
        # Large memory that means nothing between two kernels of a stream; vLLM did not count on there being two.
        ours: Any = own.get_metadata_builder()
        runners: Any = theirs.get_metadata_builder()
        if hasattr(ours, "set_workspace_buffer"):
            ours.set_workspace_buffer(runners._get_workspace_buffer())
        if hasattr(ours, "chunked_prefill_workspace"):
            ours.chunked_prefill_workspace = runners.chunked_prefill_workspace
            ours.chunked_prefill_workspace_size = runners.chunked_prefill_workspace_size

    def build(self, group: AttentionGroup, common: CommonAttentionMetadata) -> Any:
        # Since 0.32 the group fits block tables to kernels whose blocks are smaller than vLLM's.
        build = getattr(group, "build_metadata", None)
        return build(common) if build else group.get_metadata_builder().build(0, common)

    def forward_context(
        self,
        metadata: dict[str, Any],
        config: VllmConfig,
        inputs: Inputs,
        slots: dict[str, torch.Tensor],
    ) -> AbstractContextManager[None]:
        return set_forward_context(
            metadata,
            config,
            num_tokens=len(inputs.positions),
            cudagraph_runtime_mode=CUDAGraphMode.NONE if inputs.is_padding is None else CUDAGraphMode.PIECEWISE,
            # Without it nothing is written, silently.
            slot_mapping=slots,
            is_padding=inputs.is_padding,
        )

    def write_hook(self, attention: Any) -> WriteHook:
        return "do_kv_cache_update", _latent if keeps_latent(attention) else _keys_and_values

    def write(self, attention: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        update, pages = attention.impl.do_kv_cache_update, attention.kv_cache
        if keeps_latent(attention):
            latent, rotated = keys.split_with_sizes([attention.kv_lora_rank, attention.qk_rope_head_dim], -1)
            update(latent[:, 0], rotated, pages, slots, attention.kv_cache_dtype, attention._k_scale)
        else:
            update(attention, keys, values, pages, slots)


def _keys_and_values(layer: Any, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> Tensors:
    return keys, values


def _latent(latent: torch.Tensor, rotated: torch.Tensor, *rest: Any) -> Tensors:
    keys = torch.cat([latent, rotated.flatten(1)], -1)[:, None]
    return keys, keys[..., :0]
