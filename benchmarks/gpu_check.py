"""On a machine with a GPU, from a plain checkout, one part at a call: the device, its attention, or engines.

Each takes at most ten minutes. Engines need vLLM, or the pack of ``make gpu-pack``; without them their rows say so.
"""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import blendhub_cuda
import torch
from msgspec.structs import replace

from benchmarks import gpu_engine
from benchmarks.hardware_check import check, engine_of_the_checkout, rows
from benchmarks.report import Row

PACK = Path(__file__).parents[1] / "build" / "gpu-pack"
THIN: dict[str, Any] = {
    "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    "compilation_config": {"custom_ops": ["none"]},
    "attention_config": {"backend": "TRITON_ATTN"},
}
"""An engine without vLLM's compiled operators. The second model runner needs one that plain torch cannot replace."""
ABOUT_THIN = "thin engine (V1 runner, eager, attention in Triton), whose full prefills are slower than vLLM's: "


DEFAULTS: dict[str, Any] = dict.fromkeys(("enforce_eager", "distributed_executor_backend", "async_scheduling"))
"""What harness engines are asked for, left to vLLM."""


def engine() -> Iterator[Row]:
    start = partial(engine_of_the_checkout, gpu_memory_utilization=0.3, **(THIN if PACK.exists() else DEFAULTS))
    for row in chain(gpu_engine.rows(start), rows("vllm", start)):
        yield replace(row, what=f"{ABOUT_THIN}{row.what}") if PACK.exists() else row


PARTS: dict[str, dict[str, Any]] = {
    "device": {"tests_in": "plugins/cuda", "benchmark": ["benchmarks.device"]},
    "attention": {"benchmark": ["benchmarks.attention"]},
    "engine": {"engine": engine},
}

if __name__ == "__main__":
    part = sys.argv[1]
    (plugin,) = blendhub_cuda.blendhub_devices()
    sys.exit(check(f"gpu-{part}", plugin, lambda: {"gpu": torch.cuda.get_device_name()}, **PARTS[part]))
