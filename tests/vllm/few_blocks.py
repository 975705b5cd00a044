"""Has an engine's blocks be too few to blend a prompt of a model with windows."""

from typing import Any

from blendhub.vllm.scheduler.blocks import scratch


def lend_few():
    module: Any = scratch
    module.MOST_BORROWED = 0.001
