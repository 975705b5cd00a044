"""On a machine with a GPU, from a plain checkout: all tests of the CUDA device for real, its benchmark, engines.

Engines need vLLM; without it their rows say so.
"""

import sys
from functools import partial

import blendhub_cuda
import torch

from benchmarks import gpu_engine
from benchmarks.engine_check import engine_of_the_checkout, rows
from benchmarks.hardware_check import check
from benchmarks.report import Row


def engine() -> list[Row]:
    start = partial(engine_of_the_checkout, gpu_memory_utilization=0.3)
    return [*rows("vllm", start), *gpu_engine.rows(start)]


if __name__ == "__main__":
    (plugin,) = blendhub_cuda.blendhub_devices()
    machine = {"gpu": torch.cuda.get_device_name()}
    sys.exit(check("gpu", plugin, "plugins/cuda", "benchmarks.device", lambda: machine, engine))
