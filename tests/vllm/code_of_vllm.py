"""Which functions, classes and methods of vLLM are not vLLM's own, inside an engine's process."""

import sys
from functools import partial
from types import FunctionType

PACKAGES = ("vllm", "vllm_ascend")


def not_vllm_s(package):
    """``NAME, of MODULE`` for what has been put into vLLM's modules and classes from another package."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES:
            continue
        for key, one in list(vars(module).items()):
            found.append((f"{name}.{key}", home(one)))
            if isinstance(one, type) and one.__module__ == name:
                found += [(f"{name}.{key}.{part}", home(code)) for part, code in vars(one).items()]
    assert len(found) > 20_000, "an engine has more of vLLM"
    return [f"{name}, of {whose}" for name, whose in found if whose.partition(".")[0] == package]


def home(one):
    """The module that defines a function or class, whatever its attributes say; empty for all else."""
    if isinstance(one, property):
        one = one.fget
    elif isinstance(one, classmethod | staticmethod):
        one = one.__func__
    elif isinstance(one, partial):
        one = one.func
    if isinstance(one, FunctionType):
        return one.__globals__["__name__"]
    return one.__module__ if isinstance(one, type) else ""
