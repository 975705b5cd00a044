"""Which functions, classes and methods of vLLM are not vLLM's own, inside an engine's process."""

import inspect
import sys
from functools import partial


def not_vllm_s(package):
    """``NAME, of MODULE`` for what has been put into vLLM's modules and classes from another package."""
    homes = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("vllm", "vllm_ascend"):
            for key, value in list(vars(module).items()):
                homes[f"{name}.{key}"] = home(value)
                if isinstance(value, type) and value.__module__ == name:
                    homes |= {f"{name}.{key}.{part}": home(code) for part, code in vars(value).items()}
    assert len(homes) > 20_000, "an engine has more of vLLM"
    return [f"{name}, of {module}" for name, module in homes.items() if module.partition(".")[0] == package]


def home(value):
    """The module that defines a function or class, whatever its attributes say; empty for all else."""
    for kind, attribute in ((property, "fget"), ((classmethod, staticmethod), "__func__"), (partial, "func")):
        if isinstance(value, kind):
            value = getattr(value, attribute)
    if inspect.isfunction(value):
        return value.__globals__["__name__"]
    return value.__module__ if isinstance(value, type) else ""
