"""On a machine with a GPU, from a plain checkout, one part at a call: the device, its attention, or engines.

Each takes at most ten minutes. Engines need vLLM; without it their rows say so.
"""

import sys
from functools import partial
from typing import Any

import blendhub_cuda
import torch

from benchmarks import gpu_engine
from benchmarks.engine_check import engine_of_the_checkout, rows
from benchmarks.hardware_check import check
from benchmarks.report import Row


def engine() -> list[Row]:
    start = partial(engine_of_the_checkout, gpu_memory_utilization=0.3)
    return [*rows("vllm", start), *gpu_engine.rows(start)]


PARTS: dict[str, dict[str, Any]] = {
    "device": {"tests_in": "plugins/cuda", "benchmark": "benchmarks.device"},
    "attention": {"benchmark": "benchmarks.attention"},
    "engine": {"engine": engine},
}

if __name__ == "__main__":
    part = sys.argv[1]
    (plugin,) = blendhub_cuda.blendhub_devices()
    machine = {"gpu": torch.cuda.get_device_name()}
    sys.exit(check(f"gpu-{part}", plugin, lambda: machine, **PARTS[part]))
