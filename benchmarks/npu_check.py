"""On a machine with an Ascend NPU, from a plain checkout: all tests of the device for real, its benchmark, an engine.

The report names the versions of all that takes part, so that it can be sent as it is. docs/ascend.md says where to.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import blendhub_ascend

from benchmarks.hardware_check import check, engine_of_the_checkout, rows
from benchmarks.report import Row, version_of

BEYOND = "to repeat what others published of an NPU, see research/holes/README.md"
PACKAGES = ("torch", "torch_npu", "vllm", "vllm-ascend", "triton-ascend")


def machine() -> dict[str, object]:
    npu = import_module("torch_npu").npu
    versions = {name: version_of(name) for name in PACKAGES}
    return {"npu": npu.get_device_name(0), "soc_version": npu.get_soc_version(), "versions": versions, "cann": _cann()}


def _cann() -> str | None:
    """CANN's own words about its version."""
    home = Path(os.environ.get("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend/ascend-toolkit/latest"))
    found = sorted(home.glob("*/ascend_toolkit_install.info"))
    return found[0].read_text() if found else None


def engine() -> Iterator[Row]:
    return rows("vllm_ascend", partial(engine_of_the_checkout, gpu_memory_utilization=0.3))


if __name__ == "__main__":
    (plugin,) = blendhub_ascend.blendhub_devices()
    code = check(
        "npu", plugin, machine, tests_in="plugins/ascend", benchmark=["benchmarks.device", "--on", "npu"], engine=engine
    )
    print(BEYOND)
    sys.exit(code)
