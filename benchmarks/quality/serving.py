"""vLLM engines of the benchmark: one that stores, and one for each selector, which reads what that one stored."""

import contextlib
from pathlib import Path
from typing import Any

from harness.engines import Answer, Engine

PLAIN: dict[str, Any] = {"dtype": "float32", "block_size": 32}
SETTINGS: dict[str, Any] = {
    "lookup_timeout_s": 30.0,
    "audit_share": 0.0,
    "repair": "off",
    "doubt": 0,
    # Benchmarks compute documents alone, or behind little text, and reuse whether it pays or not.
    "policy": {"min_donor_context": 0, "min_reused_tokens": 64},
}
"""What every engine has whose answers or times are compared, unless it says otherwise."""


class Serving:
    """Engines of one model, and the hub that they share, which runs in the engine that stores."""

    def __init__(self, model: str, place: Path, stored_tokens: int, **options: Any) -> None:
        """``stored_tokens``: how much there must be room for. ``options`` are vLLM's."""
        shape = Shape(model)
        self.layers = shape.layers
        longest = int(options.get("max_model_len", shape.longest))
        self._model = model
        self._options = options | {"max_model_len": longest, "max_num_batched_tokens": max(4096, longest)}
        self._arena_gib = shape.arena_gib(stored_tokens, str(options.get("dtype")))
        self._endpoint = f"ipc://{place}/hub.sock"

    def storing(self, **settings: Any) -> contextlib.AbstractContextManager[Engine]:
        """Its hub ends with it."""
        hub = {"arena_gib": self._arena_gib, "metrics": "", "listen": [{"endpoint": self._endpoint}]}
        return self._engine({"hub": hub} | settings)

    def choosing(self, selector: dict[str, Any]) -> contextlib.AbstractContextManager[Engine]:
        return self._engine({"endpoint": self._endpoint, "selector": selector})

    def _engine(self, settings: dict[str, Any]) -> Engine:
        return Engine(self._model, SETTINGS | settings, **self._options)


class Shape:
    """What the model's configuration says about the size of its KV."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(model).get_text_config()
        heads = config.num_attention_heads
        self.layers = int(config.num_hidden_layers)
        self.longest = int(config.max_position_embeddings)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._token_items = 2 * self.layers * (getattr(config, "num_key_value_heads", None) or heads) * width

    def arena_gib(self, tokens: int, dtype: str) -> float:
        """Room for so many tokens, in chunks of 256 that are not all full. ``auto`` is a kind of 16-bit floats."""
        return max(0.25, 2 * tokens * self._token_items * (4 if dtype == "float32" else 2) / 2**30)


def reported(answer: Answer) -> dict[str, Any]:
    """The report; ends the benchmark if there is none of reuse."""
    if "moved_tokens" not in answer.report:
        raise SystemExit(f"BlendHub serves this model without reuse: {answer.report.get('reason')}")
    return answer.report
