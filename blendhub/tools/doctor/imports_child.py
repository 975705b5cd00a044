"""Imports what engines need, and reports each step: ``python -m blendhub.tools.doctor.imports_child FD``.

A step that fails ends the work: the later ones import what the earlier ones do.
"""

import os
import sys
import timeit
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec


def _torch() -> dict[str, Any]:
    torch = import_module("torch")
    facts: dict[str, Any] = {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except Exception as error:  # of any class: what the driver says
            facts["no_gpu"] = str(error).splitlines()[0]
        else:
            facts["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    else:
        facts["bfloat16_slowdown"] = _seconds(torch, torch.bfloat16) / _seconds(torch, torch.float32)
    return facts


def _seconds(torch: Any, dtype: Any) -> float:
    """How long the CPU takes for a layer's product of matrices."""
    tokens, weights = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: tokens @ weights, number=1, repeat=4))


def _version(name: str) -> dict[str, Any]:
    module = import_module(name)
    return {"version": str(getattr(module, "__version__", "?")), "file": str(getattr(module, "__file__", "?"))}


def _adapter() -> dict[str, Any]:
    import_module("blendhub.vllm.connector")
    return {}


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "torch_npu": lambda: _version("torch_npu"),
    "vllm": lambda: _version("vllm"),
    "adapter": _adapter,
}


def _steps() -> Iterator[dict[str, Any]]:
    for name, step in STEPS.items():
        if name != "adapter" and not find_spec(name):
            continue
        if name == "adapter" and not find_spec("vllm"):
            return
        try:
            yield {"step": name, **step()}
        except Exception as error:  # whatever a module raises while it is imported
            yield {"step": name, "error": f"{type(error).__name__}: {error}"}
            return


def main() -> None:
    with open(int(sys.argv[1]), "wb", buffering=0) as out:
        for report in _steps():
            out.write(msgspec.json.encode(report) + b"\n")
    # What was imported may have started threads that the interpreter would wait for.
    os._exit(0)


if __name__ == "__main__":
    main()
