"""Which functions and methods of vLLM other code has replaced, inside an engine's process."""

import sys
from types import FunctionType

PACKAGES = ("vllm", "vllm_ascend")
_seen: dict[str, object] = {}


def remember():
    """Before the engine is made."""
    _seen.update(_code())


def replaced():
    """The names of what is another object than then."""
    now = _code()
    return sorted(name for name, one in _seen.items() if now.get(name) is not one)


def imported():
    return len(_seen)


def _code():
    """Functions, classes, and the functions of classes, by module and name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES:
            continue
        for key, one in list(vars(module).items()):
            if isinstance(one, FunctionType | type):
                found[f"{name}.{key}"] = one
            if isinstance(one, type) and one.__module__ == name:
                methods = (FunctionType, classmethod, staticmethod, property)
                found |= {f"{name}.{key}.{part}": code for part, code in vars(one).items() if isinstance(code, methods)}
    return found
