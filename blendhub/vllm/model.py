"""The loaded model of a vLLM worker: its layers, its paged KV, and forwards of our own over chosen tokens."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.lora.layers import LoRAMapping
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from blendhub.errors import Unsupported
from blendhub.plan import Span
from blendhub.tokens import Tokens
from blendhub.vllm.runs import total

Blocks = npt.NDArray[np.int64]


class StopForward(Exception):
    """Ends a forward in the middle; never leaves this module."""


def find_runner() -> Any:
    """The model runner that is initialising KV caches somewhere up the stack: vLLM has no interface that names it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and all(hasattr(owner, name) for name in ("attn_groups", "kv_cache_config", "model")):
            return owner
        frame = frame.f_back
    raise Unsupported(
        "vLLM's model runner was not found: register_kv_caches was called by something that is not a model runner; "
        "this version of BlendHub is made for vLLM 0.32"
    )


class EngineModel:
    """What BlendHub does with the model of one worker. Everything happens on the worker's own thread."""

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        self.config = config
        self.device: torch.device = runner.device
        self.max_tokens: int = config.scheduler_config.max_num_batched_tokens
        self.max_runs: int = config.scheduler_config.max_num_seqs
        self._runner = runner
        self._groups = list(_private_groups(runner, config))
        self.layer_names = sorted((name for group in self._groups for name in group.layer_names), key=_layer_order)
        # One group of blocks: BlendHub does not declare support for vLLM's hybrid allocator, so vLLM makes no others.
        self.block_size: int = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

    def layer(self, name: str) -> Any:
        """vLLM's attention layer."""
        return self.config.compilation_config.static_forward_context[name]

    @property
    def module(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.model
        return model

    def slots(self, blocks: Blocks, runs: Sequence[Span]) -> torch.Tensor:
        """Where the tokens of the runs lie in the pages, as vLLM counts."""
        at = torch.from_numpy(positions_of(runs))
        table = torch.from_numpy(blocks)
        return table[at // self.block_size] * self.block_size + at % self.block_size

    def forward(
        self,
        tokens: Tokens,
        blocks: Blocks,
        runs: Sequence[Span],
        *,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the tokens of the runs anew, each run with everything before it as context, and write their KV.

        Each run is a request of its own to the attention layers: as many queries as the run has tokens, and a context
        that ends with it. Keys of all runs are written before any query is answered, so runs may build on
        each other. ``positions`` are other positions to pretend, for tests of the rotation.
        """
        with torch.inference_mode():
            at = torch.from_numpy(positions_of(runs))
            slots = self.slots(blocks, runs).to(self.device)
            pretended = at.to(self.device) if positions is None else positions.to(self.device)
            metadata = self._metadata(blocks, runs, pretended, slots)
            ids = torch.from_numpy(tokens.astype(np.int32))[at].to(self.device)
            context = set_forward_context(
                metadata,
                self.config,
                num_tokens=len(ids),
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                # Without it nothing is written, silently.
                slot_mapping=dict.fromkeys(self.layer_names, slots),
            )
            with self._without_adapters(len(ids), len(runs)), context:
                # int32 like the runner's own buffer: compiled models do not check, and read garbage from int64.
                hidden: torch.Tensor = self._runner.model(
                    input_ids=ids, positions=pretended, intermediate_tensors=None, inputs_embeds=None
                )
            return hidden

    def forward_until(
        self, layer: int, tokens: Tokens, blocks: Blocks, runs: Sequence[Span]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, ended where layer ``layer`` would write its KV: returns that KV, which is not written.

        The layers before it are complete, and their KV is written.
        """
        attention = self.layer(self.layer_names[layer])
        caught: list[tuple[torch.Tensor, torch.Tensor]] = []

        def catch(layer: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
            caught.append((key[:n].clone(), value[:n].clone()))
            raise StopForward

        n = total(runs)
        with _shadowed(attention.impl, "do_kv_cache_update", catch), suppress(StopForward):
            self.forward(tokens, blocks, runs)
        return caught[0]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write KV as the layer itself does."""
        attention = self.layer(self.layer_names[layer])
        with torch.inference_mode():
            attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots.to(self.device))

    @contextmanager
    def _without_adapters(self, n_tokens: int, n_runs: int) -> Iterator[None]:
        """Layers that know LoRA look up each token's adapter: these have none. The step's own come back after."""
        manager = getattr(getattr(self._runner, "lora_manager", None), "_adapter_manager", None)
        if manager is None:
            yield
            return
        before = manager._last_mapping
        manager.set_adapter_mapping(LoRAMapping((0,) * n_tokens, (0,) * n_runs, is_prefill=True))
        try:
            yield
        finally:
            if before is not None:
                manager.set_adapter_mapping(before)

    def _metadata(
        self, blocks: Blocks, runs: Sequence[Span], positions: torch.Tensor, slots: torch.Tensor
    ) -> dict[str, Any]:
        lengths = torch.tensor([len(run) for run in runs], dtype=torch.int32)
        starts = torch.zeros(len(runs) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=starts[1:])
        ends = torch.tensor([run.end for run in runs], dtype=torch.int32)
        table = torch.from_numpy(blocks.astype(np.int32))[: -(-max(run.end for run in runs) // self.block_size)]
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self.device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(runs),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table.expand(len(runs), -1).contiguous().to(self.device),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
        )
        return {name: built for group in self._groups for built in [group.build_metadata(common)]
                for name in group.layer_names}  # fmt: skip


def positions_of(runs: Sequence[Span]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(run.start, run.end, dtype=np.int64) for run in runs])


def _private_groups(runner: Any, config: VllmConfig) -> Iterator[AttentionGroup]:
    """Attention groups with builders of our own: building with the runner's would overwrite the step's metadata."""
    # The first name is the V1 runner's, the second the V2 runner's.
    sizes = getattr(runner, "_kernel_block_sizes", None) or runner.kernel_block_sizes
    with set_current_vllm_config(config):
        for number, groups in enumerate(runner.attn_groups):
            for group in groups:
                if not isinstance(group.kv_cache_spec, AttentionSpec):
                    raise Unsupported(
                        f"{group.layer_names[0]} keeps a {type(group.kv_cache_spec).__name__}, not keys and values; "
                        "models with recurrent or linear attention layers are served without reuse"
                    )
                own = AttentionGroup(group.backend, group.layer_names, group.kv_cache_spec, group.kv_cache_group_id)
                own.create_metadata_builders(config, runner.device, kernel_block_size=sizes[number])
                own.kernel_block_stride = group.kernel_block_stride
                yield own


def _layer_order(name: str) -> tuple[int, ...]:
    """Layers by their numbers: groups list them in another order."""
    return tuple(int(part) for part in name.split(".") if part.isdigit())


@contextmanager
def _shadowed(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        delattr(owner, name)
