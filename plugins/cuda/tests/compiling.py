"""Compiles the kernel as a device launches it, for GPUs that need not be present. test_compiling.py runs it.

Prints as JSON, by case, target and direction, the number of memory accesses of each size.
"""

import json
import re
from collections import Counter
from typing import Any

import torch
import triton
from blendhub_cuda import CudaOptions, kernels
from blendhub_cuda.device import CudaDevice
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blendhub.contracts import PagedLayer, Rotation
from blendhub.core.layout import KVLayout
from blendhub.testing.device_reference import torch_type
from blendhub.testing.devices.deferred import DeferredRuntime

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
COPY_TOKENS = kernels.copy_tokens


class Compiling:
    """Compiles a kernel instead of running it. Takes its place."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.accesses: dict[str, dict[str, dict[int, int]]] = {}

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return self.run

    def run(self, *given: int, **constants: Any) -> None:
        names = self.kernel.arg_names
        signature = dict.fromkeys(names[: len(given)], "i64") | dict.fromkeys(constants, "constexpr")
        values = {(names.index(name),): value for name, value in constants.items()}
        for name, target in TARGETS.items():
            made = triton.compile(ASTSource(self.kernel, signature, constexprs=values), target=target)
            direction = "load" if constants["TO_PAGES"] else "save"
            self.accesses.setdefault(name, {})[direction] = accesses(made.asm.get("ptx", ""))


def accesses(ptx: str) -> dict[int, int]:
    """The number of a kernel's loads and stores of each size in bytes, without loads of single words of its tables."""
    found = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx)
    words = ("", "64"), ("", "32")
    return dict(Counter(int(many or 1) * int(bits) // 8 for many, bits in found if (many, bits) not in words))


def compiled(dtype: str, neox: bool) -> dict[str, dict[str, dict[int, int]]]:
    """The accesses of the kernel for a model with 8 heads of 128 items, as large models have."""
    layout = KVLayout(layers=2, kv_heads=8, key_dim=128, value_dim=128, dtype=dtype, chunk_tokens=256)
    rotation = Rotation(torch.ones(1024, 128), neox)
    pages = [torch.zeros(40, 8, 16, 256).to(torch_type(dtype)) for _ in range(layout.layers)]
    compiling = kernels.copy_tokens = Compiling(COPY_TOKENS)
    device = CudaDevice(CudaOptions(), lambda device: DeferredRuntime())
    device.attach([PagedLayer("layer", "packed_heads", (one,), rotation) for one in pages], 16, layout)
    device.close()
    return compiling.accesses


if __name__ == "__main__":
    cases = [("bfloat16", True), ("float8_e4m3", False)]
    print(json.dumps({f"{dtype} {neox}": compiled(dtype, neox) for dtype, neox in cases}))
