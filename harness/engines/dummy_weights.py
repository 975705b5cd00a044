"""Dummy weights with which answers depend on what tokens attend to, and states of recurrent layers last."""

import math
from typing import Any

GAIN = 250.0
"""vLLM draws dummy weights between -1e-3 and 1e-3. With a gain of 20 they are as usual, and rounding grows little from
layer to layer."""


def draw_wide_weights(gain: str = "") -> None:
    """In an engine's process: have vLLM draw large dummy weights, and norms of 1."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights

    def load_wide(self: Any, model: Any, *others: Any) -> None:
        load(self, model, *others)
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.data.fill_(1.0)
            elif name.endswith((".A_log", ".A")):
                weights.data.fill_(-4.0 if name.endswith("_log") else -math.exp(-4.0))
            elif weights.is_floating_point():
                weights.data.mul_(float(gain or GAIN))

    DummyModelLoader.load_weights = load_wide  # type: ignore[assignment]


def mend_for_cpus(gain: str = "") -> None:
    """``draw_wide_weights``, and what vLLM does for GPUs in place of two things that are wrong on CPUs.

    Keys are rotated by torch: vLLM's operator takes the heads of keys that come head by head, as in LFM2, for tokens,
    rotates some by the positions of others, and the last ones not at all. And Mamba 2 keeps states where steps end, as
    other layers do: its kernel for CPUs gives none from within a step, so that the first prompt over a block fails.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native  # type: ignore[method-assign]
    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec  # type: ignore[method-assign]
    draw_wide_weights(gain)
