"""A process that imports everything an engine needs, and then is forked for each engine.

It only imports: threads of a pool that had computed something would be missing in its children.
"""

import gc
import importlib
import multiprocessing
import os
from multiprocessing.connection import Client
from typing import Any

from harness.engines import host

IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.async_scheduler",
    "compressed_tensors.quantization",
    "blendhub.vllm.connector",
    "blendhub.vllm.scheduler.connector_scheduler",
    "blendhub.vllm.worker.connector_worker",
    "blendhub.hub.embedded",
    "blendhub_matchers.rolling_hash",
    "blendhub_matchers.prefix",
    "blendhub_selectors.attended",
    "blendhub_transports.zmq_transport",
)
"""The modules that engines of this repository import at their start. Absent packages are left out."""

ON_A_CPU = (
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.utils.cpu_triton_utils",
    "blendhub_cpu.device",
)
"""Only where vLLM serves on a CPU: the runner for CPUs replaces vLLM's copies to the device when it is imported."""

OTHERS = ("vllm", "compressed_tensors")
"""Packages of which not every version has all of these modules."""


def main(address: str) -> None:
    line = Client(address, "AF_UNIX")
    # What is imported stays: looking for garbage would take a tenth of the time.
    gc.disable()
    host.mend_llvmlite()
    try:
        for module in line.recv():
            importlib.import_module(module)
        for module in [*IMPORTED, *(ON_A_CPU if is_build_for_cpus() else ())]:
            import_if_there(module)
    except Exception as error:
        line.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise
    _load_numba()
    look_at_models_here()
    # Each engine would look through all of it, and get its own copy of what it touches.
    gc.collect()
    gc.freeze()
    gc.enable()
    line.send("ready")
    processes: dict[int, Any] = {}
    while True:
        try:
            match line.recv():
                case ("fork", log, address):
                    process = multiprocessing.get_context("fork").Process(target=_run, args=(log, address))
                    process.start()
                    processes[process.pid or 0] = process
                    line.send(process.pid)
                case ("exit_code", pid, timeout_s):
                    processes[pid].join(timeout_s)
                    line.send(processes[pid].exitcode)
        except EOFError:
            return


def import_if_there(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        package, _, inside = (error.name or "").partition(".")
        if inside and package not in OTHERS:
            raise


def is_build_for_cpus() -> bool:
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def look_at_models_here() -> None:
    """Have vLLM import the class of a model in the engine's process, which needs it anyway.

    It would start another interpreter for each class that it has not seen before, so that this one initializes no CUDA.
    """
    if is_build_for_cpus():
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda look: look()


def _run(log: str, address: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    host.serve(Client(address, "AF_UNIX"))


def _load_numba() -> None:
    """Load what numba knows of Python's functions, which otherwise the first kernel of a process loads."""
    try:
        from numba.core.registry import cpu_target
    except ImportError:
        return
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
