"""What BlendHub's forwards need of vllm-ascend's model runner and attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup
from vllm_ascend import ascend_forward_context
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.ops import rotary_embedding

from blendhub.vllm.model.platform import Platform, Tensors, WriteHook, keeps_latent
from blendhub.vllm.model.runner import Inputs
from blendhub_ascend.vllm.refusals import refuse

SCRATCH = (
    (rotary_embedding, ("_cos", "_sin", "_cos_mla", "_sin_mla")),
    (ascend_forward_context, ("_reserved_mc2_mask",)),
)
"""Buffers that every forward overwrites. A step under way has views of them, made before BlendHub's forward."""
VIEWS = (rotary_embedding, ("_cos_slice", "_sin_slice"))
"""Views of these buffers that belong to the last forward."""


class Ascend(Platform):
    def __init__(self, runner: Any, config: VllmConfig) -> None:
        refuse(runner, config)
        self._runner = runner
        self._scratch: dict[str, torch.Tensor] = {}

    def to_device(self, numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        return torch.from_numpy(numbers).pin_memory().to(device, non_blocking=True)

    def slots(self, slots: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
        # The operators that write take no int64.
        return self.to_device(slots.astype(np.int32), device)

    def table_width(self, n_blocks: int, block_size: int) -> int:
        return n_blocks

    def prepare_group(self, own: AttentionGroup, theirs: AttentionGroup) -> None:
        builder: Any = own.get_metadata_builder()
        # All runs are prefills, even those of one token: the kernels for decodes share buffers with the step.
        builder.decode_threshold = 0
        if hasattr(builder, "chunked_prefill_workspace"):
            runners: Any = theirs.get_metadata_builder()
            builder.chunked_prefill_workspace = runners.chunked_prefill_workspace
            builder.chunked_prefill_workspace_size = runners.chunked_prefill_workspace_size

    def build(self, group: AttentionGroup, common: CommonAttentionMetadata) -> Any:
        ends = common.seq_lens_cpu_upper_bound
        starts = common.query_start_loc_cpu
        assert ends is not None
        ascend = AscendCommonAttentionMetadata(
            **vars(common)
            | {
                # Without it the builder copies the lengths from the device, and waits for that.
                "_seq_lens_cpu": ends,
                "seq_lens_cpu": ends,
                "num_computed_tokens_cpu": ends - starts.diff(),
                # The one state in which all keys are read from the pages.
                "attn_state": AscendAttentionState.ChunkedPrefill,
                "actual_seq_lengths_q": starts[1:].tolist(),
                "num_input_tokens": common.num_actual_tokens,
            }
        )
        return group.get_metadata_builder().build(0, ascend)

    @contextmanager
    def forward_context(
        self,
        metadata: dict[str, Any],
        config: VllmConfig,
        inputs: Inputs,
        slots: dict[str, torch.Tensor],
    ) -> Iterator[None]:
        # The layers write with the slots in their metadata, so the context needs none.
        with (
            self._own_scratch(),
            ascend_forward_context.set_ascend_forward_context(
                metadata,
                config,
                num_tokens=len(inputs.ids),
                num_actual_tokens=len(inputs.ids),
                model_instance=self._runner.model,
                has_sinks=self._runner._has_sinks,
                input_ids=inputs.ids,
            ),
        ):
            rotary_embedding.update_cos_sin(inputs.positions)
            yield

    def write_hook(self, attention: Any) -> WriteHook:
        # vLLM calls ``do_kv_cache_update`` of no layer here: ``forward`` writes.
        if keeps_latent(attention):
            return "exec_kv_prefill", _latent_of(attention.impl)
        return "reshape_and_cache", _keys_and_values

    def write(self, attention: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        slots = slots.to(torch.int32)
        if not keeps_latent(attention):
            attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)
            return
        # The operator that writes the latent computes it, too.
        latent_pages, rotated_pages = attention.kv_cache
        for pages, rows in ((rotated_pages, keys), (latent_pages, values)):
            pages.view(-1, *pages.shape[2:])[slots.long()] = rows

    @contextmanager
    def _own_scratch(self) -> Iterator[None]:
        """Buffers of BlendHub's own in place of those that a step under way has views of."""
        theirs = [(module, name, getattr(module, name)) for module, names in (*SCRATCH, VIEWS) for name in names]
        try:
            for module, names in SCRATCH:
                for name in names:
                    if (buffer := getattr(module, name)) is not None:
                        setattr(module, name, self._scratch.setdefault(name, buffer.clone()))
            yield
        finally:
            for module, name, value in theirs:
                setattr(module, name, value)


def _latent_of(impl: Any) -> Callable[..., Tensors]:
    """Finds the latent of MLA, which one operator computes and writes: it is given other pages to write to."""
    computed = impl.exec_kv_prefill

    def find(joint: Any, cos: Any, sin: Any, pages: Sequence[torch.Tensor], slots: torch.Tensor) -> Tensors:
        n = len(slots)
        other_pages = tuple(part.new_empty((-(-n // part.shape[1]), *part.shape[1:])) for part in pages)
        rotated, latent = computed(joint, cos, sin, other_pages, torch.arange(n, device=slots.device))
        return rotated.view(n, 1, -1), latent.view(n, 1, -1)

    return find


def _keys_and_values(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> Tensors:
    return keys, values
