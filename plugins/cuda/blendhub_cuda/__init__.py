"""The CUDA device of BlendHub. The entry point names this module, so it imports nothing heavy."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub.contracts import Device
from blendhub.framework.hookspecs import PluginSpec, Unavailable, hookimpl


class CudaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    staging_mib: Annotated[
        float,
        Meta(
            gt=0,
            le=65536,
            description="device memory that stages KV in transit; a quarter must hold one layer of a chunk",
        ),
    ] = 192.0
    block_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="neighbours that are computed in about the time of one")
    ] = 32


DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device nodes of NVIDIA's driver, of AMD's, and of Windows' in WSL."""


def _probe() -> Unavailable | None:
    if "torch" not in sys.modules and not any(Path(node).exists() for node in DRIVERS):
        # Importing torch takes seconds, which would delay every listing of the plugins.
        return Unavailable("no driver of a GPU is loaded here", "load one; nvidia-smi shows whether it is")
    if not find_spec("torch"):
        return Unavailable("torch is not installed", "pip install 'torch>=2.6'")
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda or torch.version.hip:
            tool = "nvidia-smi" if torch.version.cuda else "rocm-smi"
            return Unavailable("torch finds no GPU that it can use", f"make one visible; {tool} shows those there are")
        return Unavailable("this build of torch is for CPUs only", "pip install --force-reinstall 'torch>=2.6'")
    if not find_spec("triton"):
        return Unavailable("Triton is not installed", "pip install 'triton>=3.2'")
    return None


@hookimpl
def blendhub_devices() -> list[PluginSpec[Device]]:
    return [
        PluginSpec(
            name="cuda",
            api=1,
            summary="copies and rotates KV between host and GPU memory, beside the engine's work",
            factory="blendhub_cuda.device:CudaDevice",
            options=CudaOptions,
            probe=_probe,
        ),
    ]
