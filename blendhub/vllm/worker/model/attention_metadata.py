"""Attention metadata for BlendHub's own forwards."""

from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from blendhub.errors import Unsupported
from blendhub.plan import Span
from blendhub.vllm.worker.model.attention_builders import OwnGroup
from blendhub.vllm.worker.model.platforms import Platform
from blendhub.vllm.worker.model.runner import Runner

Blocks = npt.NDArray[np.int64]
TABLE_BYTES = 2**26
"""The most device memory for the block tables of one forward: one for each span, as long as the longest."""


class AttentionMetadata:
    """Builds the metadata of BlendHub's own forwards, apart from that of vLLM's step, which may not be computed yet."""

    def __init__(self, runner: Runner, platform: Platform, config: VllmConfig) -> None:
        self._platform = platform
        # One group of blocks: BlendHub does not declare support for vLLM's hybrid allocator, so vLLM makes no others.
        self.block_size: int = runner.block_groups[0].kv_cache_spec.block_size
        self._device = runner.device
        self._groups = list(_private_groups(runner, platform, config))
        groups = [group.first for group in self._groups]
        self.layer_names = [name for group in groups for name in group.layer_names]
        self.page_sizes: set[int] = {group.get_metadata_builder().kv_cache_spec.block_size for group in groups}
        """How many tokens the attention kernels keep in a page: a block is one of these, or several."""
        self.frees_blocks_early = not all(isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups)
        """Whether vLLM takes blocks from requests that still run: those that have left the attention's window."""
        longest = -(-config.model_config.max_model_len // self.block_size)
        row_bytes = 4 * platform.table_width(longest, self.block_size)
        self.max_spans = max(1, min(config.scheduler_config.max_num_seqs, TABLE_BYTES // row_bytes))
        """The most spans of one forward: builders have buffers for as many requests, and tables are bounded."""
        self.table_bytes = self.max_spans * row_bytes

    def build(
        self, blocks: Blocks, spans: Sequence[Span], positions: torch.Tensor, slots: torch.Tensor
    ) -> dict[str, Any]:
        """For each layer. Each span is a virtual request, whose queries are the span and whose context ends with it."""
        starts = np.zeros(len(spans) + 1, np.int32)
        np.cumsum([len(span) for span in spans], out=starts[1:])
        ends = np.array([span.end for span in spans], np.int32)
        starts_here, ends_here = torch.from_numpy(starts), torch.from_numpy(ends)
        common = CommonAttentionMetadata(
            query_start_loc=self._platform.sent(starts, self._device),
            query_start_loc_cpu=starts_here,
            seq_lens=self._platform.sent(ends, self._device),
            seq_lens_cpu_upper_bound=ends_here,
            num_reqs=len(spans),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self._table(blocks, int(ends.max())).expand(len(spans), -1).contiguous(),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(spans), dtype=torch.bool),
        )
        by_layer: dict[str, Any] = {}
        for group in self._groups:
            metadata = group.build(lambda own: self._platform.build(own, common))
            by_layer |= dict.fromkeys(group.first.layer_names, metadata)
        return by_layer

    def _table(self, blocks: Blocks, end: int) -> torch.Tensor:
        """The row of a block table."""
        needed = -(-end // self.block_size)
        row = np.zeros(self._platform.table_width(needed, self.block_size), np.int32)
        row[:needed] = blocks[:needed]
        return self._platform.sent(row, self._device)


def _private_groups(runner: Runner, platform: Platform, config: VllmConfig) -> Iterator[OwnGroup]:
    """Attention groups with builders of our own: building with the runner's would overwrite the step's metadata."""
    eager = _without_graphs(config)
    on_host = runner.device.type == "cpu"
    for number, groups in enumerate(runner.attention_groups):
        for group in groups:
            if not isinstance(group.kv_cache_spec, AttentionSpec):
                raise Unsupported(
                    f"{group.layer_names[0]} keeps a {type(group.kv_cache_spec).__name__}, not keys and values; "
                    "models with recurrent or linear attention layers are served without reuse"
                )
            size = runner.kernel_block_sizes[number]
            create = partial(_private_group, group, runner.device, size, platform, eager)
            yield OwnGroup(create, None if on_host else torch.get_device_module(runner.device).Event)


def _private_group(
    group: AttentionGroup, device: torch.device, kernel_block_size: int, platform: Platform, config: VllmConfig
) -> AttentionGroup:
    own = AttentionGroup(group.backend, group.layer_names, group.kv_cache_spec, group.kv_cache_group_id)
    with set_current_vllm_config(config):
        own.create_metadata_builders(config, device, kernel_block_size)
        platform.prepare_group(own, group)
    return own


def _without_graphs(config: VllmConfig) -> VllmConfig:
    """The same but for CUDA graphs: our forwards use none, and for graphs FlashInfer's builder would keep buffers for
    each number of requests that it ever saw."""
    eager = copy(config)
    eager.compilation_config = copy(config.compilation_config)
    eager.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    return eager
