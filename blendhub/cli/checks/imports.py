"""Imports what engines need, and prints a line of JSON for each: ``python -m blendhub.cli.checks.imports``.

An import that fails ends the work: the later ones import what the earlier ones do.
"""

import os
import timeit
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

MODULES = {"torch": "torch", "torch_npu": "torch_npu", "vllm": "vllm", "connector": "blendhub.vllm.connector"}


def _steps() -> Iterator[dict[str, Any]]:
    for step, name in MODULES.items():
        if not find_spec("vllm" if step == "connector" else name):
            continue
        try:
            module = import_module(name)
            facts = {"version": str(getattr(module, "__version__", "?")), "file": str(module.__file__)}
            yield {"step": step, **facts, **(_torch(module) if step == "torch" else {})}
        except Exception as error:  # whatever a module raises while it is imported
            yield {"step": step, "error": f"{type(error).__name__}: {error}"}
            return


def _torch(torch: Any) -> dict[str, Any]:
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except Exception as error:  # of any class: what the driver says
            return {"no_gpu": str(error).splitlines()[0]}
        return {"gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]}
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        tokens, weights = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        seconds[dtype] = min(timeit.repeat(lambda: tokens @ weights, number=1, repeat=4))  # noqa: B023
    return {"bfloat16_slowdown": seconds[torch.bfloat16] / seconds[torch.float32]}


if __name__ == "__main__":
    for report in _steps():
        print(msgspec.json.encode(report).decode(), flush=True)
    # What was imported may have started threads that the interpreter would wait for.
    os._exit(0)
