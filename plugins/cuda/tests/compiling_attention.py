"""Compiles the attention kernel for GPUs that need not be present; test_attention.py runs it in another process.

Prints as JSON the shared memory that a program takes, by case and target.
"""

import json
from typing import Any

import torch
import triton
from blendhub_cuda import attention
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blendhub.contracts import AttentionRules
from blendhub.core.layout import KVLayout
from blendhub.devices import Pages, Planes

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
}
SINKS = torch.zeros(64, dtype=torch.bfloat16)
CASES: dict[str, tuple[int, int, str, AttentionRules]] = {
    "GQA 4": (8, 128, "bfloat16", AttentionRules(32, 0.1)),
    "GQA 8, window, soft cap and sinks": (8, 64, "bfloat16", AttentionRules(64, 0.1, 128, None, 30.0, SINKS)),
    "chunks": (8, 128, "bfloat16", AttentionRules(40, 0.1, chunk=8192)),
    "8 bits": (8, 128, "float8_e4m3", AttentionRules(32, 0.1)),
    "MLA": (1, 576, "bfloat16", AttentionRules(128, 0.1, latent=512)),
    "wide heads": (2, 256, "bfloat16", AttentionRules(8, 0.1)),
}
"""Heads of keys, their width, the dtype in the pages, and the rules of a layer."""
TYPES = {torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int8: "*i8"}


class Compiling:
    """Takes the place of the kernel: compiles what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.shared: dict[str, int] = {}

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **constants: Any) -> None:
            names = self._kernel.arg_names
            signature = {name: _type(value) for name, value in zip(names, given, strict=False)}
            options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
            signature |= dict.fromkeys(constants, "constexpr")
            chosen = {(names.index(name),): value for name, value in constants.items()}
            for name, target in TARGETS.items():
                source = ASTSource(self._kernel, signature, constexprs=chosen)
                made = triton.compile(source, target=target, options=options)
                self.shared[name] = made.metadata.shared

        return launch


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i64"


def compiled(heads: int, width: int, dtype: str, rules: AttentionRules) -> dict[str, int]:
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float8_e4m3fn
    keys = torch.zeros(4, heads, 16, width).to(kind)
    values = 0 if rules.latent else width
    layout = KVLayout(layers=1, kv_heads=heads, key_dim=width, value_dim=values, dtype=dtype, chunk_tokens=16)
    patched: Any = attention
    kernel = patched.attend_chosen
    patched.attend_chosen = compiling = Compiling(kernel)
    try:
        pages = Pages((Planes(keys, keys, None),), 4, None, keys.device)
        attention.CudaAttention(pages, layout, [rules], torch.bfloat16)
    finally:
        patched.attend_chosen = kernel
    return compiling.shared


if __name__ == "__main__":
    print(json.dumps({name: compiled(*case) for name, case in CASES.items()}))
