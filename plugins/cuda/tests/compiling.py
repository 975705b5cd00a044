"""Compiles kernels as a device launches them, for GPUs that need not be present: ``python compiling.py KERNEL``.

Prints as JSON, by case, target and kernel: the shared memory that a program takes, how many memory accesses of each
size it has, and what the compiler says of its registers, of copies ahead of their use, and of products on a Hopper
GPU. It is another process than that of tests, which has the interpreter's kernels.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from blendhub_cuda import CudaOptions, attention, attention_kernel, kernels
from blendhub_cuda.device import CudaDevice
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from blendhub.contracts import AttentionRules, PagedLayer, PageFormat, Rotation
from blendhub.core.layout import KVLayout
from blendhub.devices import torch_type
from blendhub.testing.device_reference import page_shapes
from blendhub.testing.devices.deferred import DeferredRuntime

NAMES = {True: "load", False: "save"}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
COPY_TOKENS, ATTEND_CHOSEN = kernels.copy_tokens, attention_kernel.attend_chosen
BESIDE = {"merge": attention_kernel.merge_parts, "add": attention_kernel.add_received}
"""What a probe launches beside the kernel of attention."""
SINKS = torch.zeros(64, dtype=torch.bfloat16)
ATTENTIONS: dict[str, tuple[int, int, str, AttentionRules]] = {
    "GQA 4": (8, 128, "bfloat16", AttentionRules(32, 0.1)),
    "GQA 8, window, soft cap and sinks": (8, 64, "bfloat16", AttentionRules(64, 0.1, 128, None, 30.0, SINKS)),
    "chunks": (8, 128, "bfloat16", AttentionRules(40, 0.1, chunk=8192)),
    "8 bits": (8, 128, "float8_e4m3", AttentionRules(32, 0.1)),
    "MLA": (1, 576, "bfloat16", AttentionRules(128, 0.1, latent=512)),
    "wide heads": (2, 256, "bfloat16", AttentionRules(8, 0.1)),
}
"""Heads of keys, their width, the dtype in the pages, and the rules of a layer."""


class Compiling:
    """Takes the place of a kernel: compiles what would be launched."""

    def __init__(self, kernel: Any, targets: list[str], name: str = "attend") -> None:
        self.kernel = kernel
        self.name = name
        self.made: dict[str, dict[str, Any]] = {target: {} for target in targets}

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def compile(self, *given: Any, **constants: Any) -> None:
        """Numbers are small, as addresses of a heap may be: Triton passes a number in as few bits as it needs."""
        smallest = [min(value, 48) if isinstance(value, int) else value for value in given]
        what = "probe" if constants.get("PARTLY") else NAMES.get(constants.get("TO_PAGES"), self.name)
        for name, made in self.made.items():
            backend = make_backend(TARGETS[name])
            bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
            bound, specialization, options = bind(*smallest, **constants)
            options, *packed = self.kernel._pack_args(backend, options, bound, specialization, None)
            source = ASTSource(self.kernel, *packed)
            kernel = triton.compile(source, target=TARGETS[name], options=options.__dict__)
            ptx = kernel.asm.get("ptx", "")
            made[what] = {"shared": kernel.metadata.shared, "accesses": _accesses(ptx), **_usage(kernel.asm)}
            made[what] |= {"ahead": ptx.count("cp.async.cg"), "products": ptx.count("wgmma.mma_async")}


def _usage(made: Any) -> dict[str, int]:
    """A thread's registers, and the bytes of memory that it takes for want of more."""
    if "cubin" not in made:
        return {}
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", told)[0]
    return {"registers": int(registers), "spilled": int(stack)}


def _accesses(ptx: str) -> dict[int, int]:
    """The number of a kernel's loads and stores of each size in bytes, without loads of single words of its tables."""
    found = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx)
    words = ("", "64"), ("", "32")
    return dict(Counter(int(many or 1) * int(bits) // 8 for many, bits in found if (many, bits) not in words))


def copies(dtype: str, neox: bool) -> Any:
    """For a model with 8 heads of 128 items, as large models have."""
    kernels.copy_tokens = compiling = Compiling(COPY_TOKENS, list(TARGETS))
    _attach((8, 128, 128), dtype, Rotation(torch.ones(1024, 128), neox))
    return compiling.made


def attentions(heads: int, width: int, dtype: str, rules: AttentionRules) -> Any:
    kernels.copy_tokens = Compiling(COPY_TOKENS, [])
    compiling = [
        Compiling(kernel, ["sm_80", "sm_90"], name) for name, kernel in {"attend": ATTEND_CHOSEN, **BESIDE}.items()
    ]
    for name, of_kernel in zip(("attend_chosen", "merge_parts", "add_received"), compiling, strict=True):
        setattr(attention, name, of_kernel)
    _attach((heads, width, 0 if rules.latent else width), dtype).attention([rules], torch.bfloat16)
    return {
        target: {what: made for one in compiling for what, made in one.made[target].items()}
        for target in ("sm_80", "sm_90")
    }


def _attach(shape: tuple[int, int, int], dtype: str, rotation: Rotation | None = None) -> CudaDevice:
    heads, key_dim, value_dim = shape
    layout = KVLayout(layers=1, kv_heads=heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
    format: PageFormat = "packed_heads" if layout.value_dim else "latent"
    (pages,) = (torch.zeros(*one).to(torch_type(dtype)) for one in page_shapes(format, 40, 16, layout))
    device = CudaDevice(CudaOptions(), lambda place: DeferredRuntime())
    device.attach([PagedLayer("layer", format, (pages,), rotation)], 16, layout)
    return device


if __name__ == "__main__":
    if sys.argv[1] == "copy_tokens":
        made = {f"{dtype} {neox}": copies(dtype, neox) for dtype, neox in (("bfloat16", True), ("float8_e4m3", False))}
    else:
        made = {case: attentions(*given) for case, given in ATTENTIONS.items()}
    print(json.dumps(made))
