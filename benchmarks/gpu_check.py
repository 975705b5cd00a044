"""What only a GPU can tell, from a plain checkout on a machine with one: ``python -m benchmarks.gpu_check [PART ...]``.

Without a part, all questions to engines are asked in order, the most decisive first: 15 minutes in all. Each part is a
process with a limit of its own, and writes its report while it runs. Engines need vLLM; without it, rows say so.
``device`` tests and measures the device alone, and ``models`` starts engines of other models: ten minutes each.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import blendhub_cuda
import torch
from msgspec.structs import replace

from benchmarks.gpu_engine import StartEngine, checks
from benchmarks.gpu_questions import QUESTIONS, Engines, Scale
from benchmarks.hardware_check import check, engine_of_the_checkout
from benchmarks.report import Row, row
from blendhub.framework.hookspecs import available_everywhere
from harness.engines.tiny_model import TIMED

DEFAULTS: dict[str, Any] = dict.fromkeys(("enforce_eager", "distributed_executor_backend", "async_scheduling"))
"""What harness engines are asked for, left to vLLM."""
QUICK = Scale(TIMED, contexts=(1024,), sizes=(8, 64), runs=2, rounds=1)
LIMITS = {name: limit for name, (limit, _) in QUESTIONS.items()}
PARTS = [*LIMITS, "models", "device"]
MOST_S = 600


def start_on_gpu(**options: Any) -> Any:
    return engine_of_the_checkout(**{"gpu_memory_utilization": 0.3, **DEFAULTS, **options})


def start_on_cpu(model: dict[str, Any] | None = None, **options: Any) -> Any:
    """In float32: some processors have no other operators."""
    changes = {**(model or {}), "torch_dtype": "float32"}
    return engine_of_the_checkout(model=changes, dtype="float32", **options)


def asked(part: str, start: StartEngine, scale: Scale) -> Iterator[Row]:
    """The rows of a part; what ends an engine is one of them."""
    if not find_spec("vllm"):
        yield row(part, "vllm is not installed: no engine was started", "", [])
        return
    try:
        yield from checks(start) if part == "models" else QUESTIONS[part][1](Engines(start, scale))
    except Exception as error:
        yield Row(part, f"not measured: {error}", None, "", None, "lower", False, None)


def run(part: str, *, quick: bool) -> int:
    (plugin,) = blendhub_cuda.blendhub_devices()
    if quick:
        plugin = replace(plugin, probe=available_everywhere)
    machine = {"gpu": "none, a quick run" if quick else torch.cuda.get_device_name()}
    if part == "device":
        return check("gpu-device", plugin, lambda: machine, tests_in="plugins/cuda", benchmark=["benchmarks.device"])
    start, scale = (start_on_cpu, QUICK) if quick else (start_on_gpu, Scale())
    return check(f"gpu-{part}", plugin, lambda: machine, engine=partial(asked, part, start, scale))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="a small engine on the CPU: shows that it runs")
    options = parser.parse_args()
    if len(options.parts) == 1:
        return run(options.parts[0], quick=options.quick)
    codes = [within_limit(part, options.quick) for part in options.parts or LIMITS]
    return max(codes)


def within_limit(part: str, quick: bool) -> int:
    """Run a part in a process of its own, which ends with its engines when its time is over."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", part, *(["--quick"] if quick else [])]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(LIMITS.get(part, MOST_S))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        print(
            f"{part} took longer than {LIMITS.get(part, MOST_S)} s; what it had measured is in its report", flush=True
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
