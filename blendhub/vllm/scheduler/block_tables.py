"""The block tables that vLLM keeps for each request: one, or with its hybrid allocator one for each group of layers."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig


class BlockTables(NamedTuple):
    block_sizes: tuple[int, ...]
    """The tokens of a block in each table."""
    shortest_window: int | None
    """How many tokens back the nearest token is whose block vLLM may have freed; None: it frees none of a request that
    runs."""


def block_tables_of(config: KVCacheConfig) -> BlockTables:
    specs = [spec for group in config.kv_cache_groups for spec in _layer_specs(group.kv_cache_spec)]
    windows = [_window_of(spec) for spec in specs if not isinstance(spec, FullAttentionSpec)]
    return BlockTables(
        tuple(group.kv_cache_spec.block_size for group in config.kv_cache_groups), min(windows, default=None)
    )


def _layer_specs(spec: Any) -> Iterator[Any]:
    """The specs of the layers of a group, which may differ in shape only."""
    yield from spec.kv_cache_specs.values() if hasattr(spec, "kv_cache_specs") else (spec,)


def _window_of(spec: Any) -> int:
    return getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 1
