"""On a machine with a GPU, from a plain checkout, one part at a call: the device, or engines.

Each takes at most ten minutes. Engines need vLLM; without it their rows say so.
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import blendhub_cuda
import torch

from benchmarks import gpu_engine
from benchmarks.hardware_check import check, engine_of_the_checkout, rows
from benchmarks.report import Row

DEFAULTS: dict[str, Any] = dict.fromkeys(("enforce_eager", "distributed_executor_backend", "async_scheduling"))
"""What harness engines are asked for, left to vLLM."""


def engine() -> Iterator[Row]:
    start = partial(engine_of_the_checkout, gpu_memory_utilization=0.3, **DEFAULTS)
    return chain(gpu_engine.rows(start), rows("vllm", start))


PARTS: dict[str, dict[str, Any]] = {
    "device": {"tests_in": "plugins/cuda", "benchmark": ["benchmarks.device"]},
    "engine": {"engine": engine},
}

if __name__ == "__main__":
    part = sys.argv[1]
    (plugin,) = blendhub_cuda.blendhub_devices()
    sys.exit(check(f"gpu-{part}", plugin, lambda: {"gpu": torch.cuda.get_device_name()}, **PARTS[part]))
