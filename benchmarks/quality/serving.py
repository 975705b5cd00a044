"""vLLM engines of the benchmark: one that stores, and one for each selector, which reads what that one stored."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.quality.measure import Compared
from harness.engines import Engine

ROOT = Path(__file__).parents[2]
PLAIN: dict[str, Any] = {"dtype": "float32", "block_size": 32}
PATIENCE_S = 30.0


class Serving:
    """Engines of one model, and the hub that they share, which runs in the engine that stores."""

    def __init__(self, model: str, place: Path, stored_tokens: int, **options: Any) -> None:
        """``stored_tokens``: how much there must be room for. ``options`` are vLLM's."""
        shape = Shape(model)
        self.layers, self.vocabulary = shape.layers, shape.vocabulary
        self.longest = int(options.get("max_model_len", shape.longest))
        self._model = model
        self._options = options | {"max_model_len": self.longest, "max_num_batched_tokens": max(4096, self.longest)}
        # Chunks of 256 tokens are not all full.
        self._arena_gib = max(0.25, 2 * stored_tokens * shape.token_bytes(str(options.get("dtype"))) / 2**30)
        self._endpoint = f"ipc://{place}/hub.sock"

    def storing(self) -> contextlib.AbstractContextManager[Engine]:
        """Its hub ends with it. It learns, but has nothing to choose: what moved is computed anew, all or nothing."""
        hub = {"arena_gib": self._arena_gib, "metrics": "", "listen": [{"endpoint": self._endpoint}]}
        return self._engine({"hub": hub, "selector": {"name": "first_k"}})

    def alone(self, compared: Compared) -> contextlib.AbstractContextManager[Engine]:
        """An engine with this selector that stores, too."""
        hub = {"arena_gib": self._arena_gib, "metrics": ""}
        return self._engine({"hub": hub, "selector": compared.choice})

    def choosing(self, compared: Compared) -> contextlib.AbstractContextManager[Engine]:
        """An engine with this selector. It does not learn: one question must not help the next."""
        settings = {"endpoint": self._endpoint, "selector": compared.choice}
        return self._engine(settings)

    @contextlib.contextmanager
    def _engine(self, settings: dict[str, Any]) -> Iterator[Engine]:
        # An audited request is answered from exact KV.
        settings |= {"policy": {"max_recompute_share": 1.0}, "lookup_timeout_s": PATIENCE_S, "audit_share": 0.0}
        with Engine(
            self._model,
            settings,
            variables={"PYTHONPATH": str(ROOT)},
            **self._options,
        ) as engine:
            yield engine


class Shape:
    """What the model's configuration says about the size of its KV."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig

        config: Any = AutoConfig.from_pretrained(model).get_text_config()
        heads = config.num_attention_heads
        self.layers = int(config.num_hidden_layers)
        self.longest = int(config.max_position_embeddings)
        self.vocabulary = int(config.vocab_size)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._token_items = 2 * self.layers * kv_heads * width

    def token_bytes(self, dtype: str) -> int:
        """``auto`` is a kind of 16-bit floats."""
        return self._token_items * (4 if dtype == "float32" else 2)


def usual_dtype() -> str:
    """The dtype of weights and KV. vLLM's default is 16-bit floats, whose pages BlendHub does not know on every CPU."""
    import torch

    return "auto" if torch.accelerator.is_available() else "float32"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="blendhub-quality-") as place:
        yield Path(place)
