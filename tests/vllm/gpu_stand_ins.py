"""The code for GPUs in a process without one: vLLM's second model runner, the attention backends' own Python, and the
device of the CUDA plugin.

An engine's interpreter imports this before vLLM. Triton's kernels run in Triton's interpreter; of FlashAttention and
FlashInfer, ``put_in_place`` replaces by plain torch what is compiled for GPUs.
"""

import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import torch

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends

# vLLM takes Triton for unusable on a CPU unless it has a backend of this name; the interpreter needs none.
triton.backends.backends["cpu"] = SimpleNamespace(driver=None)
torch.cuda.get_device_capability = lambda device=None: (9, 0)


def attend(query, keys, values, scale):
    """Attention of one request: queries ``[m, heads, width]`` are the last of its tokens ``[n, kv heads, width]``."""
    m, n, shared = len(query), len(keys), query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = torch.einsum("mhd,nhd->hmn", query.float(), keys.float()) * scale
    visible = torch.arange(n)[None] <= torch.arange(n - m, n)[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, values.float()).to(query.dtype)


def write(key, value, key_cache, value_cache, slots, cache_dtype, key_scale, value_scale):
    """KV to pages ``[blocks, tokens, heads, width]``; slot -1 is none, and tokens behind the slots are padding."""
    at = slots[slots >= 0]
    for given, cache in ((key, key_cache), (value, value_cache)):
        cache[at // cache.shape[1], at % cache.shape[1]] = given[: len(slots)][slots >= 0].to(cache.dtype)


CACHE_OPS = torch.library.Library("_C_cache_ops", "FRAGMENT")
CACHE_OPS.define(
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slots, str cache_dtype, Tensor key_scale, Tensor value_scale) -> ()"
)
CACHE_OPS.impl("reshape_and_cache_flash", write, "CPU")


def flash_attention(q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, causal, block_table, **others):
    """FlashAttention's function: takes pages ``[blocks, tokens, heads, width]``, and a block table for each request."""
    assert causal is True and others["scheduler_metadata"] == "planned"
    starts, ends = cu_seqlens_q.tolist(), seqused_k.tolist()
    for number, end in enumerate(ends):
        mine = slice(starts[number], starts[number + 1])
        pages = block_table[number].long()
        keys, values = k[pages].flatten(0, 1)[:end], v[pages].flatten(0, 1)[:end]
        out[mine] = attend(q[mine], keys, values, softmax_scale)


def plan_flash_attention(**given):
    assert given["cu_seqlens_q"].dtype is given["cache_seqlens"].dtype is torch.int32
    assert len(given["cu_seqlens_q"]) == given["batch_size"] + 1 == len(given["cache_seqlens"]) + 1
    return "planned"


class Wrapper:
    """FlashInfer's wrapper: plans a batch on the host, then computes it layer by layer."""

    workspaces: ClassVar[set[int]] = set()

    def __init__(self, workspace, layout, use_cuda_graph=False, **others):
        assert not use_cuda_graph
        self.is_cuda_graph_enabled = False
        self._layout = layout
        self.workspaces.add(workspace.data_ptr())
        assert len(self.workspaces) == 1, "vLLM has counted on one workspace"

    def _plan(self, kind, starts, indptr, indices, last, page_size, sm_scale, window_left, logits_soft_cap):
        print(f"FlashInfer {kind}: {len(last)} runs in pages of {page_size}", flush=True)
        self._starts, self._indptr, self._indices, self._last = starts.tolist(), indptr.tolist(), indices, last.tolist()
        self._size, self._sm_scale, self._window_left = page_size, sm_scale, window_left
        self._logits_soft_cap, self._causal = logits_soft_cap or 0.0, True

    def run(self, query, pages, q_scale, k_scale, v_scale, out, **others):
        for number, last in enumerate(self._last):
            mine = slice(self._starts[number], self._starts[number + 1])
            used = self._indices[self._indptr[number] : self._indptr[number + 1]].long()
            end = (len(used) - 1) * self._size + last
            tokens_first = [one[used] if self._layout == "NHD" else one[used].transpose(1, 2) for one in pages]
            keys, values = (one.flatten(0, 1)[:end] for one in tokens_first)
            out[mine] = attend(query[mine], keys, values, self._sm_scale)


class PrefillWrapper(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, sm_scale, window_left,
        logits_soft_cap, **others,
    ):  # fmt: skip
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan("prefill", *given, page_size, sm_scale, window_left, logits_soft_cap)


class DecodeWrapper(Wrapper):
    def plan(self, indptr, indices, last_page_len, page_size, sm_scale, window_left, logits_soft_cap, **others):
        starts = torch.arange(len(last_page_len) + 1)
        given = (starts, indptr, indices, last_page_len)
        self._plan("decode", *given, page_size, sm_scale, window_left, logits_soft_cap)


def lengths(indptr, last_page_len, page_size):
    return (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len


def module(name, **content):
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    for key, value in content.items():
        setattr(made, key, value)
    sys.modules[name] = made


def put_device_in_place(attends):
    """The CUDA plugin's device over host memory: copies end late, and none runs before something waits for it."""
    import blendhub_cuda.device
    from triton.runtime.interpreter import GridExecutor

    from blendhub.contracts import Device
    from blendhub.framework.hookspecs import available_everywhere
    from blendhub.testing.devices.deferred import DeferredRuntime
    from blendhub.vllm.model import layer_groups
    from blendhub.vllm.worker.start import attention_choice, measured_costs

    class LateRuntime(DeferredRuntime):
        def synchronize(self, event):
            if not event.done:
                time.sleep(0.05)  # some steps of the engine
            super().synchronize(event)

    device, interpret = blendhub_cuda.device.CudaDevice, GridExecutor.__call__
    blendhub_cuda._probe = available_everywhere
    layer_groups.LEAST_BYTES = 0
    device.__init__.__defaults__ = (lambda place: LateRuntime(),)

    def interpret_alone(executor, *arguments, **named):
        with DeferredRuntime._lock:  # the engine's kernels run on another thread
            interpret(executor, *arguments, **named)

    GridExecutor.__call__ = interpret_alone
    if attends:  # over a few tokens, and without costs: all of it takes seconds in the interpreter
        compared = attention_choice._compared
        attention_choice._compared = lambda *given: (compared(*given), (0.0, 1.0))[1]
        attention_choice.PROMPT_TOKENS, attention_choice.CHOSEN_TOKENS = 64, 8
        measured_costs.SECONDS = 0.0
    else:
        device.attention = Device.attention


def put_in_place(attention, second_runner, kernel_block, attends=""):
    """``attention`` names the backend that stands where vLLM has that for CPUs; ``kernel_block`` how many tokens its
    kernels take for a block, if not its own choice; ``attends`` whether chosen tokens attend by the device.
    """
    put_device_in_place(attends)
    os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": second_runner, "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE": str(2**20)}
    module(
        "flashinfer",
        BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper,
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
        BatchAttentionWithAttentionSinkWrapper=type("Other", (Wrapper,), {}),
        BatchPrefillWithRaggedKVCacheWrapper=type("Other", (Wrapper,), {}),
        get_seq_lens=lengths,
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping=None,
    )
    module("flashinfer.decode", fast_decode_plan=None, trtllm_batch_decode_with_kv_cache=None)
    module("flashinfer.prefill", trtllm_batch_context_with_kv_cache=None)
    counters = ("get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes")
    module("flashinfer.utils", FP4Tensor=None, **dict.fromkeys(counters, lambda *given: 0))

    from vllm.v1.attention.backends import fa_utils

    fa_utils.compile_flash_attn_varlen_func_from_specs = None
    fa_utils.flash_attn_varlen_func = flash_attention
    fa_utils.get_scheduler_metadata = plan_flash_attention
    fa_utils.reshape_and_cache_flash = write
    fa_utils.is_flash_attn_varlen_func_available = lambda: True
    fa_utils.get_flash_attn_version = lambda *given, **named: 3

    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = AttentionBackendEnum[attention].get_class()
    if attention == "FLASHINFER":  # vLLM 0.33 has counters for Blackwell, on the GPU
        sys.modules[backend.__module__]._get_multi_ctas_kv_counter_buffer = lambda size, place: None
    if kernel_block:
        backend.get_supported_kernel_block_sizes = classmethod(lambda cls, spec=None: [int(kernel_block)])
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{backend.__module__}.{backend.__qualname__}")
