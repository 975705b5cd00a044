"""Stand-ins in plain torch for vLLM's compiled operators, as far as eager engines with attention in Triton need them.

A pack has this file as ``vllm.torch_ops``, so it imports nothing but torch.
"""

from collections.abc import Callable
from typing import Any

import torch


def silu_and_mul(out: torch.Tensor, given: torch.Tensor) -> None:
    gate, up = given.chunk(2, -1)
    torch.mul(torch.nn.functional.silu(gate), up, out=out)


def rms_norm(out: torch.Tensor, given: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    out.copy_(torch.nn.functional.rms_norm(given, given.shape[-1:], weight, epsilon))


def fused_add_rms_norm(
    given: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    residual += given
    rms_norm(given, residual, weight, epsilon)


def topk_softmax(
    weights: torch.Tensor,
    experts: torch.Tensor,
    rows: torch.Tensor,
    scores: torch.Tensor,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> None:
    """The experts of each token, and their weights."""
    shares = scores.float().softmax(-1)
    chosen = (shares if bias is None else shares + bias).topk(weights.shape[-1], -1).indices
    picked = shares.gather(-1, chosen)
    weights.copy_(picked / picked.sum(-1, keepdim=True) if renormalize else picked)
    experts.copy_(chosen)


def moe_align_block_size(
    experts: torch.Tensor,
    n_experts: int,
    block: int,
    sorted_places: torch.Tensor,
    expert_of_block: torch.Tensor,
    n_padded: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    scatter: torch.Tensor | None = None,
) -> None:
    """The places of all choices, expert by expert, each expert's padded to whole blocks.

    Nothing waits for the device.
    """
    flat = experts.flatten().long()
    counts = torch.zeros(n_experts, dtype=torch.long, device=flat.device).index_add_(0, flat, torch.ones_like(flat))
    ends = ((counts + block - 1) // block * block).cumsum(0)
    starts = ends - (counts + block - 1) // block * block
    order = flat.argsort(stable=True)
    ordered = flat[order]
    rank = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[ordered]
    sorted_places.fill_(len(flat))
    sorted_places[starts[ordered] + rank] = order.to(sorted_places.dtype)
    firsts = torch.arange(len(expert_of_block), device=flat.device) * block
    found = torch.searchsorted(ends, firsts, right=True).clamp_(max=n_experts - 1)
    expert_of_block.copy_(found)
    n_padded.copy_(ends[-1:])


def moe_sum(
    given: torch.Tensor,
    out: torch.Tensor,
    experts: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    torch.sum(given, 1, out=out)


def is_supported(capability: int) -> bool:
    """Whether there is a kernel for 8-bit or 4-bit floats."""
    return False


def weak_ref_tensor(given: torch.Tensor) -> torch.Tensor:
    """The same memory, which is not kept: graphs own it."""
    whole = given.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), given.device, whole.nbytes())
    seen = torch.empty(0, dtype=given.dtype, device=given.device)
    return seen.set_(alias, given.storage_offset(), given.size(), given.stride())


class Mapped:
    """Page-locked memory of the host, as a GPU sees it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def get_cuda_view_from_cpu_tensor(given: torch.Tensor) -> torch.Tensor:
    if not given.numel():
        return torch.empty(given.shape, dtype=given.dtype, device="cuda")
    memory = given if given.is_pinned() else given.pin_memory()
    return torch.as_tensor(Mapped(memory), device="cuda").view(given.dtype).view(given.shape)


def never(*given: torch.Tensor) -> None:
    raise NotImplementedError("a pack has names of operators for vLLM's fusions, and fuses nothing")


FUSED = (
    *("rotary_embedding", "fused_qk_norm_rope", "static_scaled_fp8_quant", "dynamic_scaled_fp8_quant"),
    *("dynamic_per_token_scaled_fp8_quant", "per_token_group_fp8_quant", "scaled_fp4_quant", "silu_and_mul_quant"),
    *("silu_and_mul_per_block_quant", "silu_and_mul_nvfp4_quant", "rms_norm_static_fp8_quant"),
    *("fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant"),
)
"""What vLLM's passes over compiled graphs name at their import."""

OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "_C::silu_and_mul": ("Tensor(a!) out, Tensor given", silu_and_mul),
    "_C::rms_norm": ("Tensor(a!) out, Tensor given, Tensor? weight, float epsilon", rms_norm),
    "_C::fused_add_rms_norm": (
        "Tensor(a!) given, Tensor(b!) residual, Tensor? weight, float epsilon",
        fused_add_rms_norm,
    ),
    "_moe_C::topk_softmax": (
        "Tensor(a!) weights, Tensor(b!) experts, Tensor(c!) rows, Tensor scores, bool renormalize=False, "
        "Tensor? bias=None, Tensor? is_padding=None",
        topk_softmax,
    ),
    "_moe_C::moe_align_block_size": (
        "Tensor experts, int n_experts, int block, Tensor(a!) sorted_places, Tensor(b!) expert_of_block, "
        "Tensor(c!) n_padded, Tensor? expert_map=None, Tensor? scatter=None",
        moe_align_block_size,
    ),
    "_moe_C::moe_sum": (
        "Tensor given, Tensor(a!) out, Tensor? experts=None, Tensor? expert_map=None",
        moe_sum,
    ),
    **{f"_C::{name}": ("", never) for name in FUSED},
    "_C::weak_ref_tensor": ("Tensor given", weak_ref_tensor),
    "_C::get_cuda_view_from_cpu_tensor": ("Tensor given", get_cuda_view_from_cpu_tensor),
    **{
        f"_C::cutlass_scaled_mm_supports_{kind}": ("int capability", is_supported)
        for kind in ("fp4", "fp8", "block_fp8")
    },
}
"""The operators by their names: what they take, and what computes them. vLLM asks for the last ones at its import."""

RETURNS: dict[Callable[..., Any], str] = {
    is_supported: "bool",
    weak_ref_tensor: "Tensor",
    get_cuda_view_from_cpu_tensor: "Tensor",
}
LIBRARIES: list[torch.library.Library] = []
"""What was registered is forgotten with its library."""


def register() -> None:
    """Register the operators, as the import of a compiled module does."""
    for name, (arguments, compute) in OPERATORS.items():
        namespace, _, operator = name.partition("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(f"{operator}({arguments}) -> {RETURNS.get(compute, '()')}")
        library.impl(operator, compute, "CompositeExplicitAutograd")
        LIBRARIES.append(library)
