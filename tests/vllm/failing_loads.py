"""In an engine's process: loads that fail."""

from typing import Any

from blendhub.vllm.worker.layer_copies import LayerCopies

LOAD = LayerCopies.load


def fail_from_now_on() -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("the accelerator is lost")

    LayerCopies.load = fail


def load_again() -> None:
    LayerCopies.load = LOAD
