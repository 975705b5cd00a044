"""The CPU device of BlendHub. The entry point names this module, so it imports nothing heavy."""

from importlib.util import find_spec

from blendhub.contracts import Device
from blendhub.framework.hookspecs import PluginSpec, Unavailable, hookimpl
from blendhub_cpu.options import CpuOptions


def _probe() -> Unavailable | None:
    for module, wanted in (("torch", "torch>=2.4"), ("numba", "numba>=0.61")):
        if not find_spec(module):
            return Unavailable(f"{module} is not installed", f"pip install '{wanted}'")
    return None


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [
        PluginSpec(
            name="cpu",
            api=3,
            summary="copies and rotates KV in host memory, on its own threads",
            factory="blendhub_cpu.device:CpuDevice",
            options=CpuOptions,
            probe=_probe,
        ),
    ]
