"""Looks at a model's files before vLLM does, which would take minutes and say it in pages."""

from pathlib import Path
from typing import Any

from blendhub.core.errors import InvalidInput


def check_model(model: str, engine: dict[str, Any]) -> None:
    """Raises InvalidInput if weights in this directory are cut short, or more than the memory of vLLM's devices."""
    from safetensors import SafetensorError, safe_open
    from vllm.platforms import current_platform

    files = sorted(Path(model).glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass  # opening compares the length of the file with what its header says
        except SafetensorError as error:
            raise InvalidInput(f"{file} is cut short or damaged ({error}): download or copy it again") from None
    ranks = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    memory = ranks * current_platform.get_device_total_memory() + engine.get("cpu_offload_gb", 0) * 2**30
    needed = sum(file.stat().st_size for file in files)
    if needed > memory:
        raise InvalidInput(
            f"the weights of {model} take {needed / 2**30:.1f} GiB, and {ranks} x {current_platform.device_type} has "
            f"{memory / 2**30:.1f} GiB of memory: measure on a larger machine, or on more devices, as with "
            """--engine '{"tensor_parallel_size": 2}'"""
        )
