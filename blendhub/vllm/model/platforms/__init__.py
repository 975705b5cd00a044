"""What differs between vLLM's own model runners and those of vllm-ascend, in one class for each."""

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig

from blendhub.vllm.model.platforms.platform import Platform, Tensors, keeps_latent

__all__ = ["Platform", "Tensors", "keeps_latent", "platform_of"]

ASCEND = "vllm_ascend"


def platform_of(runner: Any, config: VllmConfig, layer_names: Sequence[str]) -> Platform:
    """The platform whose attention backend computes these layers. Raises Unsupported if BlendHub cannot serve it."""
    layers = [config.compilation_config.static_forward_context[name] for name in layer_names]
    packages = {layer.get_attn_backend().__module__.split(".")[0] for layer in layers if hasattr(layer, "impl")}
    # Each module imports names that the other platform's version of vLLM lacks.
    if ASCEND in packages:
        from blendhub.vllm.model.platforms.ascend import Ascend

        return Ascend(runner, config, layers)
    from blendhub.vllm.model.platforms.upstream import Upstream

    return Upstream()
