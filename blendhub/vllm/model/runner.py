"""The part of vLLM's model runner, V1 or V2, that BlendHub needs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from blendhub.core.errors import Unsupported
from blendhub.system.served_vllm import SERVED
from blendhub.vllm.model.sampling import Look, watch_sampling

NEEDED = ("device", "get_model", "model", "attn_groups", "kv_cache_config", "supports_mm_inputs", "model_config")
KERNEL_BLOCK_SIZES = ("_kernel_block_sizes", "kernel_block_sizes")
"""The attribute's name in V1 and in V2; vllm-ascend uses that of V2."""
KNOWN_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
OTHER_SPECS = ("HiddenStateCacheSpec", "RSWASpec", "SinkFullAttentionSpec")
"""Kinds of KV that vLLM derives from that of full attention, and whose blocks hold other tokens."""

STATE = "DefaultModelState"
"""The kind of vLLM's model state that gives a model nothing but tokens and their positions."""

SERVED_WITHOUT = "the model is served without reuse"


class Runner:
    """One interface to either of vLLM's two model runners."""

    def __init__(self, runner: Any) -> None:
        missing = [name for name in NEEDED if not hasattr(runner, name)]
        sizes: Any = next((getattr(runner, name) for name in KERNEL_BLOCK_SIZES if hasattr(runner, name)), None)
        if sizes is None:
            missing.append(" or ".join(KERNEL_BLOCK_SIZES))
        if missing:
            raise Unsupported(
                f"vLLM's {type(runner).__module__}.{type(runner).__name__} has no {', '.join(missing)}; "
                f"this version of BlendHub is made for {SERVED}"
            )
        self.device: torch.device = runner.device
        self.attention_groups: list[list[Any]] = runner.attn_groups
        # vllm-ascend has a list for each group, with the one size that it selected.
        self.kernel_block_sizes: list[int] = [size[0] if isinstance(size, list) else size for size in sizes]
        """For each group of blocks, the number of tokens in a block of the attention kernels."""
        self.block_groups: list[Any] = runner.kv_cache_config.kv_cache_groups
        self.n_blocks: int = runner.kv_cache_config.num_blocks
        self.takes_embeddings = bool(runner.supports_mm_inputs or runner.model_config.enable_prompt_embeds)
        """Whether the runner embeds tokens itself, and gives the model the embeddings."""
        # V2 has an object for the connector, whose calls it makes after it has sampled.
        self.samples_last = self.device.type != "cpu" and not hasattr(runner, "kv_connector")
        """Whether a step's tokens are sampled on an accelerator after the connector has loaded."""
        self._runner = runner

    @property
    def layers(self) -> dict[str, tuple[int, Any]]:
        """For each attention layer, the number of its block table, and its attention group. Raises Unsupported for
        layers that keep other things than a key and a value for each token, or a state of which blocks hold copies."""
        layers: dict[str, tuple[int, Any]] = {}
        for table, groups in enumerate(self.attention_groups):
            for group in groups:
                _check_spec(group.layer_names[0], group.kv_cache_spec)
                if not isinstance(group.kv_cache_spec, MambaSpec):
                    layers |= dict.fromkeys(group.layer_names, (table, group))
        if not layers and self.recurrent:
            raise Unsupported(f"all layers keep a recurrent state, and none a key and a value; {SERVED_WITHOUT}")
        known = layers.keys() | self.recurrent
        others = [name for group in self.block_groups for name in group.layer_names if name not in known]
        if others and len(self.block_groups) > 1:
            raise Unsupported(f"{others[0]} has blocks, and no attention layer does; {SERVED_WITHOUT}")
        return layers

    @property
    def recurrent(self) -> dict[str, tuple[int, MambaSpec]]:
        """For each recurrent layer, the number of its block table, and what its state is."""
        return {
            name: (table, group.kv_cache_spec)
            for table, groups in enumerate(self.attention_groups)
            for group in groups
            if isinstance(group.kv_cache_spec, MambaSpec)
            for name in group.layer_names
        }

    @property
    def module(self) -> torch.nn.Module:
        """The model, without wrappers for graphs."""
        module: torch.nn.Module = self._runner.get_model()
        return module

    @property
    def proposer(self) -> Any:
        """What proposes tokens, if anything does. V1 calls it a drafter, and V2 a speculator."""
        return getattr(self._runner, "drafter", None) or getattr(self._runner, "speculator", None)

    @property
    def draft_module(self) -> torch.nn.Module | None:
        """The model that proposes tokens, if one does."""
        model: torch.nn.Module | None = getattr(self.proposer, "model", None)
        return model

    @property
    def forward(self) -> Any:
        """The function that the runner itself calls to compute a step."""
        return self._runner.model

    def graphs(self, config: VllmConfig) -> "Graphs":
        """The graphs of pieces that vLLM has captured; raises Unsupported where there are none to replay."""
        return Graphs(self._runner, config)

    def dimensions(self, positions: torch.Tensor, max_tokens: int) -> torch.Tensor:
        """Positions of text as the model takes them: with M-RoPE, the same ones in each dimension."""
        config = self._runner.model_config
        if not config.uses_mrope:
            return positions
        n_dimensions: int = getattr(config, "mrope_num_dims", 3)
        # A compiled model may rely on rows being as far apart as in the runner's own buffer.
        rows = positions.new_zeros(n_dimensions, max_tokens + 1)
        rows[:, : len(positions)] = positions
        return rows[:, : len(positions)]

    def watch_sampling(self, look: Look) -> None:
        """Have ``look`` called before each step is sampled; raises Unsupported where a token cannot be held."""
        watch_sampling(self._runner, look)

    @property
    def adapters(self) -> Any:
        """The manager that keeps the LoRA adapters, and sets that of each token; None without LoRA."""
        return getattr(getattr(self._runner, "lora_manager", None), "_adapter_manager", None)


class Inputs(NamedTuple):
    """What a model is called with, with room behind the tokens if graphs are replayed."""

    ids: torch.Tensor
    positions: torch.Tensor
    is_padding: torch.Tensor | None = None
    """Which of them are no tokens; None: no graph is replayed."""


class Graphs:
    """vLLM's CUDA graphs of the pieces between attention, which small forwards of BlendHub's own replay.

    A graph reads its inputs where they were when it was captured: in buffers of the runner, in which those of a step
    may stand already. Attention is between the pieces, and is looked up when it runs.
    """

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        """Raises Unsupported if forwards cannot replay any."""
        if why := _why_not(runner, config):
            raise Unsupported(why)
        self._manager = runner.cudagraph_manager
        self._buffers: tuple[torch.Tensor, ...] = (
            runner.input_buffers.input_ids,
            runner.input_buffers.positions,
            runner.input_buffers.is_padding,
        )
        self.most = max((n for n in config.compilation_config.cudagraph_capture_sizes or () if self.size(n)), default=0)
        """The most tokens of a forward that replays graphs."""
        if not self.most:
            raise Unsupported("vLLM has captured none of pieces between attention")

    def size(self, n: int) -> int | None:
        """How many tokens the graphs have that a forward over ``n`` replays; None: none have as many."""
        # As a batch with prompts in it, which replays no graph of whole steps.
        found = self._manager.dispatch(1, n, None, 0)
        return int(found.num_tokens) if found.cg_mode == CUDAGraphMode.PIECEWISE else None

    @contextmanager
    def inputs(self, ids: torch.Tensor, positions: torch.Tensor, size: int) -> Iterator[Inputs]:
        """These tokens where graphs of this size read them. Behind the context the buffers are as before."""
        n, own = len(ids), [buffer[:size] for buffer in self._buffers]
        before = [part.clone() for part in own]
        try:
            own[0][:n], own[1][:n], own[2][:n] = ids, positions, False
            own[0][n:], own[1][n:], own[2][n:] = 0, 0, True
            yield Inputs(*own)
        finally:
            for part, theirs in zip(own, before, strict=True):
                part.copy_(theirs)


def _why_not(runner: Any, config: VllmConfig) -> str:
    manager, state = getattr(runner, "cudagraph_manager", None), getattr(runner, "model_state", None)
    if manager is None or not hasattr(runner, "input_buffers"):
        return "vLLM's model runner V2 has them, and V1 serves this model"
    if not manager.cudagraph_mode.has_piecewise_cudagraphs():
        return f"cudagraph_mode is {manager.cudagraph_mode.name}"
    if manager.use_breakable_cg:
        return "vLLM breaks graphs of the whole model, and has none of pieces"
    if not config.compilation_config.splitting_ops_contain_kv_cache_update():
        return "the pieces write KV themselves"
    if config.parallel_config.data_parallel_size > 1:
        return "all ranks with data in parallel would have to"
    if config.lora_config:
        return "the pieces compute LoRA adapters"
    if config.speculative_config:
        return "a drafter computes tokens, too"
    if type(state).__name__ != STATE or getattr(state, "rope_state", None) or runner.supports_mm_inputs:
        return "the model takes more than tokens and positions"
    if config.model_config.enable_prompt_embeds:
        return "the model takes embeddings"
    return ""


def _check_spec(name: str, spec: Any) -> None:
    kind = type(spec).__name__
    if isinstance(spec, MambaSpec):
        _check_states(name, spec)
        return
    if kind == "CircularBufferSpec":
        raise Unsupported(
            f"{name} keeps a ring of keys that are still being compressed ({kind}), of which vLLM keeps the last ones "
            f"of a request only; {SERVED_WITHOUT}"
        )
    if not isinstance(spec, KNOWN_SPECS) or kind in OTHER_SPECS or getattr(spec, "tokens_per_state", 1) != 1:
        raise Unsupported(f"{name} keeps a {kind}, not a key and a value of each token; {SERVED_WITHOUT}")
    if getattr(spec, "bounded_replay", False):
        raise Unsupported(f"{name} keeps a window that vLLM computes anew behind each reused prefix; {SERVED_WITHOUT}")


def _check_states(name: str, spec: MambaSpec) -> None:
    if spec.mamba_cache_mode != "align":
        raise Unsupported(
            f"{name} keeps a recurrent state, and none of blocks that are full (mamba_cache_mode is "
            f"{spec.mamba_cache_mode!r}, not 'align', which it is with --enable-prefix-caching); {SERVED_WITHOUT}"
        )
    if spec.num_speculative_blocks:
        raise Unsupported(
            f"{name} keeps a recurrent state for each token that speculation proposes, of which not all come to be; "
            f"{SERVED_WITHOUT}"
        )


def find_caller(*methods: str) -> Any:
    """The object with these methods, one of which is running somewhere up the stack: vLLM has no interface for it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and all(hasattr(owner, name) for name in methods):
            return owner
        frame = frame.f_back
    raise Unsupported(
        f"BlendHub was called by nothing that has {' and '.join(methods)}, as vLLM has; "
        f"this version of BlendHub is made for {SERVED}"
    )
