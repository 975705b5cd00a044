"""The block tables that vLLM keeps for each request: one, or with its hybrid allocator one for each group of layers."""

from collections import Counter
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

MAX_BORROWED = 0.5
"""The largest share of vLLM's blocks that is borrowed at a time to blend: what they had cached is lost."""


class Window(NamedTuple):
    """The tokens that a token attends to in layers of which vLLM frees blocks."""

    size: int
    is_chunk: bool = False
    """Whether they begin with the token's own chunk of ``size`` tokens (Llama 4), not ``size`` tokens before it."""

    def begin(self, position: int) -> int:
        """The first token that the one at ``position`` attends to."""
        return position // self.size * self.size if self.is_chunk else max(0, position - self.size + 1)


class BlockTables(NamedTuple):
    block_sizes: tuple[int, ...]
    """The tokens of a block in each table."""
    windows: tuple[Window | None, ...]
    """The window that blocks of each table leave, so that vLLM frees them; None: it frees none."""
    of_states: tuple[int, ...] = ()
    """The tables of recurrent layers: a block holds the state behind its last token, or none."""

    @property
    def state_tokens(self) -> int | None:
        """The tokens from one state that vLLM may keep to the next; None: the model has no recurrent layers."""
        return self.block_sizes[self.of_states[0]] if self.of_states else None

    @property
    def shortest_window(self) -> int | None:
        """The size of the smallest window, before which vLLM frees blocks of running requests; None: it frees none."""
        return min((window.size for window in self.windows if window), default=None)


def block_tables_of(config: KVCacheConfig) -> BlockTables:
    groups = config.kv_cache_groups
    return BlockTables(
        tuple(group.kv_cache_spec.block_size for group in groups),
        tuple(map(_window_of_group, groups)),
        tuple(number for number, group in enumerate(groups) if isinstance(_of_layers(group)[0], MambaSpec)),
    )


def _window_of_group(group: KVCacheGroupSpec) -> Window | None:
    spec = _of_layers(group)[0]  # the layers of a group have the same
    if isinstance(spec, FullAttentionSpec | MambaSpec):
        return None
    return Window(_window_of(spec), isinstance(spec, ChunkedLocalAttentionSpec))


def _specs(config: KVCacheConfig) -> list[Any]:
    """The spec of each layer."""
    return [spec for group in config.kv_cache_groups for spec in _of_layers(group)]


def _of_layers(group: KVCacheGroupSpec) -> list[Any]:
    # In groups whose layers differ in shape, each has its own.
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(specs.values()) if specs else [group.kv_cache_spec] * len(group.layer_names)


def _window_of(spec: Any) -> int:
    return getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0


def capacity_line(engine: VllmConfig, config: KVCacheConfig, *, blends: bool) -> str:
    """What vLLM's KV cache holds, what is reused of each group of layers, and what blending costs, or would cost."""
    tokens = int(get_max_concurrency_for_kv_cache_config(engine, config) * engine.model_config.max_model_len)
    kinds = Counter(map(_kind, _specs(config)))
    reused = "; ".join(f"{count} layers {kind}" for kind, count in kinds.items())
    line = f"KV capacity {tokens:,} tokens, the same as without BlendHub: {reused}"
    if blends and any(block_tables_of(config).windows):
        line += (
            f"; while a prompt is blended, free blocks hold what has left a window, at most {MAX_BORROWED:.0%} of all"
        )
    elif any(_window_of(spec) for spec in _specs(config) if isinstance(spec, FullAttentionSpec)):
        line += "; with vLLM's hybrid allocator, which is off, more may fit"
    return line


def _kind(spec: Any) -> str:
    if isinstance(spec, FullAttentionSpec):  # with the allocator off, layers with windows are kept so, too
        return "of which all tokens are kept and reused"
    if isinstance(spec, MambaSpec):
        return f"with a recurrent state, reused where one is stored behind a multiple of {spec.block_size} tokens"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"with chunks of {_window_of(spec)}, of which the tokens of the last chunk are reused"
    return f"with a window of {_window_of(spec)}, of which the tokens that a window still needs are reused"
