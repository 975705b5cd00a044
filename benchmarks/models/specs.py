"""The layers' KV of architectures that vLLM's build for CPUs does not serve, as vLLM describes them on GPUs.

Sizes are those of the published models on one rank of eight where they are larger than a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_capacity,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)

from blendhub.vllm.plugin import register

BLOCK, MEMORY, LONGEST = 16, 2**34, 131_072
CONNECTOR = KVTransferConfig(kv_connector="BlendHubConnector", kv_role="kv_both")


class _Model:
    """The part of a model's configuration that counts for the capacity."""

    max_model_len = LONGEST
    hf_config = None

    def __getattr__(self, name: str) -> Any:
        return None


def capacity(architecture: str, *, with_blendhub: bool) -> int:
    """The tokens that vLLM's KV cache holds of an architecture."""
    config = _config(CONNECTOR if with_blendhub else None)
    groups = groups_of(SPECS[architecture](), config)
    return get_kv_cache_capacity(config, get_kv_cache_config_from_groups(config, groups, MEMORY))[0]


def groups_of(layers: Sequence[KVCacheSpec], config: VllmConfig | None = None) -> list[KVCacheGroupSpec]:
    """The groups that vLLM makes of these layers with its hybrid allocator: those with one block table."""
    return get_kv_cache_groups(config or _config(CONNECTOR), {f"layers.{at}": spec for at, spec in enumerate(layers)})


def _config(connector: KVTransferConfig | None) -> VllmConfig:
    register()
    config = VllmConfig(kv_transfer_config=connector, cache_config=CacheConfig(block_size=BLOCK))
    config.model_config = _Model()  # type: ignore[assignment]
    # The layout that can express layers of all sizes.
    config.cache_config.kv_cache_layout = "BLHNC"
    return config


def latent(**others: Any) -> KVCacheSpec:
    given: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**given | others)


def _deepseek_v32() -> list[KVCacheSpec]:
    """The indexer keeps a key of 128 bytes, and its scale, beside each latent."""
    return [latent() for _ in range(61)] + [latent(head_size=132, dtype=torch.uint8) for _ in range(61)]


def _deepseek_v41() -> list[KVCacheSpec]:
    """A latent of every two tokens, latents of a window, and a ring of raw keys for each request."""
    common: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.bfloat16}
    kind: dict[str, Any] = {"model_version": "deepseek_v4", "alignment": 512}
    window: dict[str, Any] = {"block_size": BLOCK, "sliding_window": 128, "bounded_replay": True}
    return [
        *(latent(head_size=512, tokens_per_state=2, **kind) for _ in range(30)),
        *(SlidingWindowMLASpec(**common, **kind, **window) for _ in range(30)),
        *(CircularBufferSpec(block_size=BLOCK // 2, **common) for _ in range(30)),
    ]


def _qwen3_next() -> list[KVCacheSpec]:
    """Three layers with a recurrent state for each with attention. vLLM makes their pages equally large."""
    attention = FullAttentionSpec(block_size=544, num_kv_heads=2, head_size=256, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=LONGEST,
        shapes=((3, 8192), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.bfloat16),
        page_size_padded=attention.page_size_bytes,
    )
    return [attention if number % 4 == 3 else state for number in range(48)]


SPECS = {
    "deepseek_v3": lambda: [latent() for _ in range(61)],
    "deepseek_v32": _deepseek_v32,
    "deepseek_v41": _deepseek_v41,
    "kimi_k2": lambda: [latent() for _ in range(61)],
    "qwen3_next": _qwen3_next,
}
