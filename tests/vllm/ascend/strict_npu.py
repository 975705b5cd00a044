"""torch_npu without an NPU: the operators of vllm-ascend's attention on CPU tensors, and strict.

Whatever the operators' documents do not allow raises. ``npu_fused_infer_attention_score`` (FIA) computes in float32.
A process imports this before vllm_ascend, once.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from plugins.ascend.tests import strict_ops
from plugins.ascend.tests.strict_ops import require

FLOATS = (torch.float16, torch.bfloat16)
MASKS = {}
"""The one that was checked last: vllm-ascend keeps one for a process."""


def reshape_and_cache(*, key, value, key_cache, value_cache, slot_indices):
    """That of the device's tests, on copies: rows may have gaps, and addresses of the host say nothing."""
    key, value, slots = (one.clone(memory_format=torch.contiguous_format) for one in (key, value, slot_indices))
    strict_ops.reshape_and_cache(key, value, key_cache, value_cache, slots)


def fused_infer_attention_score(
    *, query, key, value, atten_mask, block_table, input_layout, block_size, actual_seq_lengths, actual_seq_lengths_kv,
    num_key_value_heads, num_heads, scale, sparse_mode,
):  # fmt: skip
    """Causal attention of queries ``[tokens, heads, width]`` to keys in pages, or beside the queries."""
    require(query.dtype in FLOATS and key.dtype == value.dtype == query.dtype, "FIA takes float16 and bfloat16")
    require(input_layout == "TND" and query.shape[1:] == (num_heads, 128), "TND has heads of width 128")
    require(sparse_mode == 3, "only causal attention, aligned to the end of each sequence")
    require(atten_mask.dtype == torch.int8 and atten_mask.shape == (2048, 2048), "the mask is an int8 triangle")
    if atten_mask is not MASKS.get("checked"):
        require(atten_mask.equal(torch.ones(2048, 2048, dtype=torch.int8).triu(1)), "the mask hides what comes later")
        MASKS["checked"] = atten_mask
    for lengths in (actual_seq_lengths, actual_seq_lengths_kv):
        require(isinstance(lengths, list) and all(type(one) is int for one in lengths), "lengths are lists of int")
    ends = actual_seq_lengths
    require(ends == sorted(ends) and ends[-1] == len(query), "lengths of queries are cumulative, and end with the last")
    require(len(actual_seq_lengths_kv) == len(ends), "error 561002: a length of keys for each request")
    if block_table is not None:
        require(block_table.dtype == torch.int32 and len(block_table) == len(ends), "error 561002: a row per request")
        require(key.dim() == 3 and key.shape[1] == block_size == 128, "pages are [blocks, 128, heads * width]")
    result = torch.empty_like(query)
    first = 0
    for number, end in enumerate(ends):
        n = actual_seq_lengths_kv[number]
        if block_table is None:
            keys, values = (one[n - (end - first) : n] for one in (key, value))
            n = end - first
        else:
            n_pages = -(-n // block_size)
            require(n_pages <= block_table.shape[1], "the block table is too narrow")
            pages = block_table[number, :n_pages].long()
            require(bool(((pages >= 0) & (pages < len(key))).all()), "a block is beyond the cache")
            keys, values = (one[pages].view(-1, num_key_value_heads, 128)[:n] for one in (key, value))
        result[first:end] = attend(query[first:end], keys, values, scale)
        first = end
    return result, torch.empty(0)


def attend(query, keys, values, scale):
    """Queries are the last of the tokens whose keys are given."""
    m, n, shared = len(query), len(keys), query.shape[1] // keys.shape[1]
    require(m <= n, "a request has more queries than keys")
    keys, values = (one.float().repeat_interleave(shared, 1) for one in (keys, values))
    scores = torch.einsum("mhd,nhd->hmn", query.float(), keys) * scale
    hidden = torch.arange(n)[None] > torch.arange(n - m, n)[:, None]
    return torch.einsum("hmn,nhd->mhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values).to(query.dtype)


def kv_rmsnorm_rope_cache(
    kv, gamma, cos, sin, index, k_cache, ckv_cache, *, c_kv_scale=None, epsilon=1e-5, cache_mode="Norm",
    is_output_kv=False,
):  # fmt: skip
    """The operator of MLA: normalises the latent, rotates the rest, and writes both to pages."""
    require(kv.dim() == 4 and kv.shape[1:] == (1, 1, 576) and kv.dtype in FLOATS, "rows are [n, 1, 1, 512 + 64]")
    require(cos.shape == sin.shape == (len(kv), 1, 1, 64) and cos.dtype == sin.dtype == kv.dtype, "an angle per row")
    require(index.dtype == torch.int64 and index.shape == (len(kv),), "slots of int64, one per row")
    require(cache_mode == "PA" and c_kv_scale is None, "pages in torch's order")
    require(k_cache.shape[2:] == (1, 64) and ckv_cache.shape[2:] == (1, 512), "the rotated pages come first")
    require(bool(((index >= 0) & (index < k_cache.shape[0] * k_cache.shape[1])).all()), "a slot is beyond the cache")
    latent, rest = kv.float().split([512, 64], -1)
    latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + epsilon) * gamma.float()
    rest = torch.cat([rest[..., ::2], rest[..., 1::2]], -1)
    first, second = rest.chunk(2, -1)
    rotated = rest * cos.float() + torch.cat([-second, first], -1) * sin.float()
    latent, rotated = latent.to(kv.dtype), rotated.to(kv.dtype)
    for rows, cache in ((rotated, k_cache), (latent, ckv_cache)):
        cache.view(-1, *cache.shape[2:])[index] = rows[:, 0]
    return k_cache, ckv_cache, *((rotated, latent) if is_output_kv else (None, None))


def compute_slots(starts, positions, block_table, slots, block_size):
    for number in range(len(starts) - 1):
        mine = slice(int(starts[number]), int(starts[number + 1]))
        at = positions[mine]
        slots[mine] = block_table[number, at // block_size].long() * block_size + at % block_size
    slots[int(starts[-1]) :] = -1


COMPILED = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor at, Tensor table, Tensor(a!) slots, int size) -> ()": (
        compute_slots
    ),
}
"""The operators of vLLM 0.23 for CPUs that its runner needs, and that are compiled for another torch."""


def absent(*given, **named):
    raise RuntimeError("an operator that BlendHub's forwards must not reach")


def module(name, **content):
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.__path__ = []
    for key, value in content.items():
        setattr(made, key, value)
    sys.modules[name] = made
    return made


def put_in_place():
    types = {name: type(name, (), {}) for name in ("Event", "ExternalEvent", "Stream", "NPUGraph")}
    torch.npu = module("torch_npu.npu", is_available=lambda: False, _lazy_init=lambda: None, **types)
    sys.modules["torch.npu"] = torch.npu
    module(
        "torch_npu",
        npu=torch.npu,
        _C=module("torch_npu._C", _NPUTaskGroupHandle=type("Handle", (), {})),
        _npu_reshape_and_cache=reshape_and_cache,
        npu_fused_infer_attention_score=fused_infer_attention_score,
        npu_kv_rmsnorm_rope_cache=kv_rmsnorm_rope_cache,
        npu_fusion_attention=absent,
        _npu_paged_attention=absent,
    )
    # torch pins memory only where there is an accelerator.
    torch.Tensor.pin_memory = lambda self, device=None: self


OPERATORS = torch.library.Library("_C", "FRAGMENT")
for schema, kernel in COMPILED.items():
    OPERATORS.define(schema)
    OPERATORS.impl(schema.split("(")[0], kernel, "CompositeExplicitAutograd")

put_in_place()
