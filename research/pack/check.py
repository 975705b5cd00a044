"""Measures thin engines, of a pack, on a machine with a GPU: ``python -m research.pack.check [PART ...]``."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import blendhub_cuda
import torch
from msgspec.structs import replace

from benchmarks.gpu_check import DEFAULTS, LIMITS, asked
from benchmarks.gpu_questions import Scale
from benchmarks.hardware_check import check, engine_of_the_checkout
from benchmarks.report import Row

FIRST = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
THIN: dict[str, Any] = {
    **({} if FIRST else DEFAULTS),
    "environment": {"VLLM_USE_V2_MODEL_RUNNER": str(int(not FIRST)), "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    "compilation_config": {"custom_ops": ["none"]},
    "attention_config": {"backend": "TRITON_ATTN"},
}
"""An engine without vLLM's compiled operators: with the second model runner, compiled, or with the first one, eager."""
KIND = "V1 runner, eager" if FIRST else "V2 runner, compiled"
ABOUT = f"thin engine ({KIND}, attention in Triton), whose full prefills are slower than vLLM's: "


def engine() -> Iterator[Row]:
    start = partial(engine_of_the_checkout, gpu_memory_utilization=0.3, **THIN)
    for row in chain.from_iterable(asked(part, start, Scale()) for part in sys.argv[1:] or LIMITS):
        yield replace(row, what=f"{ABOUT}{row.what}")


if __name__ == "__main__":
    (plugin,) = blendhub_cuda.blendhub_devices()
    sys.exit(check("gpu-engine", plugin, lambda: {"gpu": torch.cuda.get_device_name()}, engine=engine))
