"""An engine whose attention backend makes no second builder of metadata, as one of a new kind may not."""

import importlib
from typing import Any


def fail() -> None:
    """In an engine's process."""
    engine_model: Any = importlib.import_module("blendhub.vllm.model.engine_model")

    def refuse(*given: object) -> None:
        raise ValueError("there is one workspace only")

    engine_model.AttentionMetadata = refuse
