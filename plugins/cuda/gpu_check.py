"""On a machine with a GPU, from a plain checkout, one part at a call: the device, its attention, or engines.

Each takes at most ten minutes. Engines need vLLM, or the pack of ``make gpu-pack``; without them their rows say so.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import blendhub_cuda
import torch

from benchmarks import gpu_engine
from benchmarks.hardware_check import check, engine_of_the_checkout, rows
from benchmarks.report import Row

PACK = Path(__file__).parents[2] / "build" / "gpu-pack"
THIN: dict[str, Any] = {
    "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    "compilation_config": {"custom_ops": ["none"]},
    "attention_config": {"backend": "TRITON_ATTN"},
}
"""An engine without vLLM's compiled operators. The second model runner needs one that plain torch cannot replace."""


def engine() -> list[Row]:
    start = partial(engine_of_the_checkout, gpu_memory_utilization=0.3, **(THIN if PACK.exists() else {}))
    return [*rows("vllm", start), *gpu_engine.rows(start)]


PARTS: dict[str, dict[str, Any]] = {
    "device": {"tests_in": "plugins/cuda", "benchmark": ["benchmarks.device"]},
    "attention": {"benchmark": ["benchmarks.attention"]},
    "engine": {"engine": engine},
}

if __name__ == "__main__":
    part = sys.argv[1]
    (plugin,) = blendhub_cuda.blendhub_devices()
    sys.exit(check(f"gpu-{part}", plugin, lambda: {"gpu": torch.cuda.get_device_name()}, **PARTS[part]))
