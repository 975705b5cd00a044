"""The layers' KV of architectures that vLLM's build for CPUs does not serve, as vLLM describes them on GPUs.

Sizes are those of the published models on one rank of eight where they are larger than a GPU.
"""

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
    register()
    connector = CONNECTOR if with_blendhub else None
    config = VllmConfig(kv_transfer_config=connector, cache_config=CacheConfig(block_size=BLOCK))
    config.model_config = _Model()  # type: ignore[assignment]
    # The layout that can express layers of all sizes.
    config.cache_config.kv_cache_layout = "BLHNC"
    groups = get_kv_cache_groups(config, _layers(architecture))
    return get_kv_cache_capacity(config, get_kv_cache_config_from_groups(config, groups, MEMORY))[0]


def _layers(architecture: str) -> dict[str, KVCacheSpec]:
    return {f"layers.{number}": spec for number, spec in enumerate(SPECS[architecture]())}


def _latent(**others: Any) -> KVCacheSpec:
    given: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return MLAAttentionSpec(**given | others)


def _deepseek_v32() -> list[KVCacheSpec]:
    """The indexer keeps a key of 128 bytes, and its scale, beside each latent."""
    return [_latent() for _ in range(61)] + [_latent(head_size=132, dtype=torch.uint8) for _ in range(61)]


def _deepseek_v41() -> list[KVCacheSpec]:
    """Latents of all tokens, latents of a window, and a ring of raw keys for each request."""
    window: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.bfloat16, "sliding_window": 128}
    ring: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.bfloat16}
    return [
        *(_latent(head_size=512) for _ in range(30)),
        *(SlidingWindowMLASpec(block_size=BLOCK, **window) for _ in range(30)),
        *(CircularBufferSpec(block_size=BLOCK // 2, **ring) for _ in range(30)),
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
    "deepseek_v3": lambda: [_latent() for _ in range(61)],
    "deepseek_v32": _deepseek_v32,
    "deepseek_v41": _deepseek_v41,
    "kimi_k2": lambda: [_latent() for _ in range(61)],
    "qwen3_next": _qwen3_next,
}
