"""Compiles the attention kernel for GPUs that need not be present; test_attention.py runs it in another process.

Prints as JSON the shared memory that a program takes, by case and target.
"""

import json
from typing import Any

import numpy as np
import torch
import triton
from blendhub_cuda import attention
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
}
CASES: dict[str, dict[str, Any]] = {
    "GQA 4": {"heads": 32, "key_heads": 8, "width": 128},
    "GQA 8, window, soft cap and sinks": {"heads": 64, "key_heads": 8, "width": 64, "window": 128, "soft_cap": 30.0},
    "8 bits": {"heads": 32, "key_heads": 8, "width": 128, "cache": torch.float8_e4m3fn},
    "MLA": {"heads": 128, "key_heads": 1, "width": 576, "latent": True},
    "wide heads": {"heads": 8, "key_heads": 2, "width": 256},
}
TYPES = {torch.bfloat16: "*bf16", torch.int32: "*i32", torch.float8_e4m3fn: "*i8", torch.int8: "*i8"}


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


def compiled(
    heads: int, key_heads: int, width: int, *, cache: torch.dtype = torch.bfloat16, latent: bool = False, **how: Any
) -> dict[str, int]:
    keys = torch.zeros(4, 16, key_heads, width, dtype=torch.float32).to(cache)
    queries = torch.zeros(8, heads, width, dtype=torch.bfloat16)
    positions = torch.arange(8, dtype=torch.int32)
    at = positions.numpy().astype(np.int64)
    tiles = attention.tiles_of(at, 0 * at, heads // key_heads, width, keys.device)
    sinks = torch.zeros(heads, dtype=torch.bfloat16) if "soft_cap" in how else None
    kernel = attention.attend_chosen
    attention.attend_chosen = compiling = Compiling(kernel)  # type: ignore[assignment]
    try:
        pages, blocks = attention.AttendedPages(keys, None if latent else keys), torch.zeros(1, 4, dtype=torch.int32)
        attention.attend(queries, positions, pages, blocks, tiles, scale=0.1, sinks=sinks, **how)
    finally:
        attention.attend_chosen = kernel
    return compiling.shared


if __name__ == "__main__":
    print(json.dumps({name: compiled(**case) for name, case in CASES.items()}))
