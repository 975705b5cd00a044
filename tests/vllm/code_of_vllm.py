"""Which functions, classes and methods of vLLM other code has replaced, inside an engine's process."""

import sys
from types import FunctionType

PACKAGES = ("vllm", "vllm_ascend")
OWN = (*PACKAGES, "engine_harness")
"""vLLM replaces some functions itself, such as kernels by those of CPUs, and so does the harness."""
METHODS = (FunctionType, classmethod, staticmethod, property)
_seen: dict[str, tuple[object, str, object]] = {}


def remember():
    """Before the engine is made."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES:
            continue
        for key, one in list(vars(module).items()):
            if isinstance(one, FunctionType | type):
                _seen[f"{name}.{key}"] = module, key, one
            if isinstance(one, type) and one.__module__ == name:
                parts = ((part, code) for part, code in vars(one).items() if isinstance(code, METHODS))
                _seen.update({f"{name}.{key}.{part}": (one, part, code) for part, code in parts})


def remembered():
    return len(_seen)


def replaced():
    """The names of what is another object than then, and whose it is now."""
    found = []
    for name, (owner, key, one) in _seen.items():
        now = vars(owner).get(key)
        whose = getattr(now, "__module__", None) or type(now).__module__
        if now is not one and whose.partition(".")[0] not in OWN:
            found.append(f"{name}, now of {whose}")
    return found
