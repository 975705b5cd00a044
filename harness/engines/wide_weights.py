"""Dummy weights that are large enough: with vLLM's own, answers hardly depend on what tokens attend to."""

from typing import Any

GAIN = 250.0
"""vLLM draws dummy weights between -1e-3 and 1e-3."""


def widen() -> None:
    """Have vLLM draw large weights, and norms of 1, in this process. Call it before vLLM makes the engine."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights

    def load_wide(self: Any, model: Any, *others: Any) -> None:
        load(self, model, *others)
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.data.fill_(1.0)
            elif weights.is_floating_point():
                weights.data.mul_(GAIN)

    DummyModelLoader.load_weights = load_wide  # type: ignore[assignment, method-assign]
