"""Attention metadata for BlendHub's own forwards, from builders whose memory no kernel reads any more."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.utils import AttentionGroup

from blendhub.core.spans import Span
from blendhub.vllm.model.platform import Platform
from blendhub.vllm.model.recompute_set import RecomputeSet
from blendhub.vllm.model.runner import Runner

TABLE_BYTES = 2**26
"""The most device memory for the block tables of one forward: one for each span, as long as the longest."""

SPANS = 256
"""The number of spans of one forward that is possible even where vLLM serves fewer requests at a time."""


class AttentionMetadata:
    """Builds the metadata of BlendHub's own forwards, apart from that of vLLM's step, which may not be computed yet."""

    def __init__(self, runner: Runner, platform: Platform, config: VllmConfig) -> None:
        self._platform = platform
        self._block_sizes = [int(group.kv_cache_spec.block_size) for group in runner.block_groups]
        self._device = runner.device
        longest = config.model_config.max_model_len
        row_bytes = 4 * sum(platform.table_width(-(-longest // size), size) for size in self._block_sizes)
        most = max(SPANS, config.scheduler_config.max_num_seqs)
        most = max(1, min(most, TABLE_BYTES // row_bytes))
        private = list(_private_groups(runner, platform, _config_of_forwards(config, most)))
        self._groups = [(table, group) for table, group in private if not _keeps_states(group)]
        """The groups of attention layers, each with the number of its block table."""
        self._state_groups = [(table, group) for table, group in private if _keeps_states(group)]
        """The groups of recurrent layers."""
        groups = [group.first for _, group in self._groups]
        self.layer_names = [name for group in groups for name in group.layer_names]
        self.max_spans = max(1, min([most, *map(_most_contexts, groups)]))
        """The most spans of one forward: builders have buffers for as many requests, and tables are bounded."""
        self.table_bytes = self.max_spans * row_bytes

    def build(self, chosen: RecomputeSet, positions: torch.Tensor, slots: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The metadata for each layer. A span is a virtual request whose context ends with its queries: the span.

        ``slots``: those of the tokens in each block table.
        """
        end = max(span.end for span in chosen.spans)
        tables = {number: self._table(chosen, number, end) for number, _ in self._groups}
        return self._built(self._groups, chosen.spans, positions, tables, slots)

    def of_states(self, span: Span, blocks: Mapping[int, int], slots: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The metadata for each recurrent layer, as of a request with this span alone.

        ``blocks``: the block with its state in each table of such layers.
        """
        rows = {
            table: np.full((1, self._platform.table_width(-(-span.end // size), size)), blocks[table], np.int32)
            for table, size in enumerate(self._block_sizes)
            if table in blocks
        }
        tables = {table: self._platform.to_device(row, self._device) for table, row in rows.items()}
        positions = torch.arange(span.start, span.end, device=self._device)
        return self._built(self._state_groups, [span], positions, tables, slots)

    def _built(
        self,
        groups: Sequence[tuple[int, "OwnGroup"]],
        spans: Sequence[Span],
        positions: torch.Tensor,
        tables: Mapping[int, torch.Tensor],
        slots: Sequence[torch.Tensor],
    ) -> dict[str, Any]:
        starts = np.zeros(len(spans) + 1, np.int32)
        np.cumsum([len(span) for span in spans], out=starts[1:])
        ends = np.array([span.end for span in spans], np.int32)
        starts_here, ends_here = torch.from_numpy(starts), torch.from_numpy(ends)
        first = groups[0][0]
        common = CommonAttentionMetadata(
            query_start_loc=self._platform.to_device(starts, self._device),
            query_start_loc_cpu=starts_here,
            seq_lens=self._platform.to_device(ends, self._device),
            seq_lens_cpu_upper_bound=ends_here,
            num_reqs=len(spans),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=tables[first],
            slot_mapping=slots[first],
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(spans), dtype=torch.bool),
        )
        by_layer: dict[str, Any] = {}
        for number, group in groups:
            mine = replace(common, block_table_tensor=tables[number], slot_mapping=slots[number])
            metadata = group.build(partial(self._platform.build, common=mine))
            by_layer |= dict.fromkeys(group.first.layer_names, metadata)
        return by_layer

    def _table(self, chosen: RecomputeSet, number: int, end: int) -> torch.Tensor:
        """A block table: each span has the row of its prompt."""
        size = self._block_sizes[number]
        needed = -(-end // size)
        rows = np.zeros((len(chosen.parts), self._platform.table_width(needed, size)), np.int32)
        rows[:, :needed] = chosen.table(needed, number)
        # Rows are long and spans are many: a row of each prompt is sent, and repeated there.
        owners = self._platform.to_device(chosen.owners, self._device)
        return self._platform.to_device(rows, self._device).index_select(0, owners)


NewEvent = Callable[[], Any]


class OwnGroup:
    """The attention group of some layers.

    Work of one stream is in order, so a builder may overwrite device memory at once. But the device reads host memory
    later, when a copy's turn has come. Where a builder keeps such memory, two take turns, and each waits for its own
    last copies. A whole forward was submitted after these, so the device has usually done them.
    """

    def __init__(self, create: Callable[[], AttentionGroup], new_event: NewEvent | None) -> None:
        """``new_event``: creates an event of the device; None where the host computes."""
        self._create = create
        self._new_event = new_event
        self._turns = [_Turn(create(), None)]

    @property
    def first(self) -> AttentionGroup:
        return self._turns[0].group

    def build(self, build: Callable[[AttentionGroup], Any]) -> Any:
        """Call ``build`` with the group whose turn it is."""
        turn = self._turns.pop(0)
        if turn.copied:
            turn.copied.synchronize()
        built = build(turn.group)
        if self._new_event and keeps_host_memory(turn.group.get_metadata_builder()):
            turn.copied = turn.copied or self._new_event()
            turn.copied.record()
            if not self._turns:
                self._turns.append(_Turn(self._create(), None))
        self._turns.append(turn)
        return built


class _Turn:
    def __init__(self, group: AttentionGroup, copied: Any) -> None:
        self.group = group
        self.copied = copied
        """Reached when the device has read all host memory of the builder; None: it keeps none."""


def keeps_host_memory(builder: Any) -> bool:
    """Whether a builder, or what it plans with, has memory of the host that it may copy from.

    It may get some when it is used, so this holds for what it has been used for.
    """
    return any(_is_host_memory(member) for value in _members(builder) for member in (value, *_members(value)))


def _members(owner: Any) -> Iterator[Any]:
    values = owner.values() if isinstance(owner, dict) else owner if isinstance(owner, list | tuple) else ()
    yield from values
    # Of vLLM's configuration every builder has a reference, and it leads to the whole model.
    if hasattr(owner, "__dict__") and not type(owner).__module__.startswith(("vllm.config", "vllm.v1.kv_cache")):
        yield from vars(owner).values()


def _is_host_memory(member: Any) -> bool:
    if isinstance(member, torch.Tensor):
        return member.device.type == "cpu" and member.numel() > 0
    return isinstance(member, np.ndarray)


def _keeps_states(group: OwnGroup) -> bool:
    return isinstance(group.first.kv_cache_spec, MambaSpec)


def _private_groups(runner: Runner, platform: Platform, config: VllmConfig) -> Iterator[tuple[int, OwnGroup]]:
    """Attention groups with builders of our own: building with the runner's would overwrite the step's metadata."""
    on_host = runner.device.type == "cpu"
    for number, groups in enumerate(runner.attention_groups):
        for group in groups:
            size = runner.kernel_block_sizes[number]
            create = partial(_private_group, group, runner.device, size, platform, config)
            yield number, OwnGroup(create, None if on_host else torch.get_device_module(runner.device).Event)


def _private_group(
    group: AttentionGroup, device: torch.device, kernel_block_size: int, platform: Platform, config: VllmConfig
) -> AttentionGroup:
    spec = group.kv_cache_spec
    if getattr(spec, "num_prefill_checkpoint_blocks", 0):
        # All blocks in our tables are the one with the request's state: a state from within a span has no place there.
        spec = replace(spec, num_prefill_checkpoint_blocks=0)  # type: ignore[call-arg]
    own = AttentionGroup(group.backend, group.layer_names, spec, group.kv_cache_group_id)
    with set_current_vllm_config(config):
        own.create_metadata_builders(config, device, kernel_block_size)
        platform.prepare_group(own, group)
    return own


def _config_of_forwards(config: VllmConfig, max_spans: int) -> VllmConfig:
    """The same but for the number of requests and CUDA graphs: our forwards use none, and for graphs FlashInfer's
    builder would keep buffers for each number of requests that it ever saw."""
    own = copy(config)
    own.compilation_config = copy(config.compilation_config)
    own.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    own.scheduler_config = copy(config.scheduler_config)
    own.scheduler_config.max_num_seqs = max_spans
    return own


def _most_contexts(group: AttentionGroup) -> int:
    """How many contexts fit into the memory, a page of each, in which MLA gathers them. No limit for other kinds."""
    builder: Any = group.get_metadata_builder()
    tokens: int | None = getattr(builder, "chunked_prefill_workspace_size", None)
    return sys.maxsize if tokens is None else tokens // int(builder.kv_cache_spec.block_size)
