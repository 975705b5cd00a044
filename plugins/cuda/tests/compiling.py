"""Compiles the kernels that a device launches, for GPUs that need not be present. test_compiling.py runs it.

Prints as JSON, by case, target and kernel, the number of memory accesses of each size.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
from blendhub_cuda import CudaOptions
from blendhub_cuda.device import CudaDevice
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blendhub import Span
from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.core.layout import KVLayout
from blendhub.testing.device_reference import torch_type
from blendhub.testing.devices.deferred import DeferredRuntime

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CHUNK = 256


class CompilingRuntime(DeferredRuntime):
    """Compiles kernels instead of running them."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: dict[str, dict[str, dict[int, int]]] = {}

    def launch(self, stream: Any, kernel: Any, arguments: Mapping[str, Any]) -> None:
        kernel = kernel.kernel  # without its grid
        names = kernel.arg_names
        constants = {(names.index(p.name),): arguments[p.name] for p in kernel.params if p.is_constexpr}
        signature = {p.name: "constexpr" if p.is_constexpr else "i64" for p in kernel.params}
        for name, target in TARGETS.items():
            made = triton.compile(ASTSource(kernel, signature, constexprs=constants), target=target)
            self.compiled.setdefault(name, {})[kernel.__name__] = accesses(made.asm.get("ptx", ""))


def accesses(ptx: str) -> dict[int, int]:
    """The number of a kernel's loads and stores of each size in bytes, without those of its tables' words."""
    found = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return dict(Counter(int(many or 1) * int(bits) // 8 for many, bits in found if (many, bits) != ("", "64")))


def compiled(dtype: str, neox: bool) -> dict[str, dict[str, dict[int, int]]]:
    """The accesses of all kernels for a model with 8 heads of 128 items, as large models have."""
    layout = KVLayout(layers=2, kv_heads=8, key_dim=128, value_dim=128, dtype=dtype, chunk_tokens=CHUNK)
    rotation = Rotation(torch.ones(1024, 128), neox)
    pages = [torch.zeros(40, 8, 16, 256).to(torch_type(dtype)) for _ in range(layout.layers)]
    runtime = CompilingRuntime()
    device = CudaDevice(CudaOptions(), lambda device: runtime)
    device.attach([PagedLayer("layer", "packed_heads", (one,), rotation) for one in pages], 16, layout)
    device.pin(np.zeros(layout.shard_bytes, np.uint8))
    segments, blocks = [Segment(Span(0, CHUNK), 0, 0, 300)], np.arange(16)
    device.load(segments, blocks).wait()
    device.save(segments, blocks).wait()
    device.close()
    return runtime.compiled


if __name__ == "__main__":
    cases = [("bfloat16", True), ("float8_e4m3", False)]
    print(json.dumps({f"{dtype} {neox}": compiled(dtype, neox) for dtype, neox in cases}))
