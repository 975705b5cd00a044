"""Why the device cannot run here, and the command that changes it."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from blendhub.framework.hookspecs import Unavailable

DRIVER = Path("/dev/davinci_manager")
"""The device node of the NPU's driver. Containers must be given it."""
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
INSTALL = "pip install torch==2.10.0 torch_npu==2.10.0.post4"


def probe() -> Unavailable | None:
    for module in ("torch", "torch_npu"):
        if not find_spec(module):
            return Unavailable(f"{module} is not installed", INSTALL)
    if "torch_npu" not in sys.modules and not DRIVER.exists():
        # Importing torch and torch_npu takes seconds, which would delay every listing of the plugins.
        return Unavailable(f"no driver of an Ascend NPU is loaded here: there is no {DRIVER}", "npu-smi info")
    try:
        # torch_npu registers itself to be loaded by torch, so that torch fails where torch_npu does.
        import_module("torch")
        torch_npu = import_module("torch_npu")
    except Exception as error:
        return _import_failure(error)
    if not torch_npu.npu.is_available():
        return Unavailable("torch_npu finds no NPU that it can use", "npu-smi info")
    return None


def details() -> tuple[str, ...]:
    """The operators that this machine's torch_npu offers, and why others are not used. Called after ``probe``."""
    operators = import_module("blendhub_ascend.operators")
    chip = operators.chip_of(import_module("torch_npu").npu.get_soc_version())
    return tuple(operators.offered(chip))


def _import_failure(error: Exception) -> Unavailable:
    text = " ".join(str(error).split())
    if isinstance(error, OSError | ImportError) or ".so" in text:
        reason = f"torch_npu cannot load CANN's libraries ({text}); for work without an NPU, torch imports again with"
        return Unavailable(f"{reason} TORCH_DEVICE_BACKEND_AUTOLOAD=0", SET_ENV)
    return Unavailable(f"torch_npu cannot be imported: {text}", INSTALL)
