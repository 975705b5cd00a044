"""Kimi Linear on CPUs: plain torch in place of the kernels for GPUs that vLLM's layers call. The layers are vLLM's."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from harness.engines.dummy_weights import draw_wide_weights

KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
LAYER = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
MODEL = "vllm.models.kimi_k3.nvidia.model"
ATTENTION = "vllm.models.kimi_k3.nvidia.mla"
PREFILL = "vllm.v1.attention.backends.mla.prefill.cpu_sdpa"
EPSILON = 1e-6


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The outputs of tokens ``[tokens, heads, width]``; the state ``[heads, values, keys]`` goes with them."""
    q, k = (rows * (rows.square().sum(-1, keepdim=True) + EPSILON).rsqrt() for rows in (q.float(), k.float()))
    outputs = torch.empty_like(v)
    for at in range(len(v)):
        state *= decay[at][:, None]
        new = (v[at] - torch.einsum("hvk,hk->hv", state, k[at])) * beta[at][:, None]
        state += new[:, :, None] * k[at][:, None]
        outputs[at] = torch.einsum("hvk,hk->hv", state, q[at] * q.shape[-1] ** -0.5)
    return outputs


def gates(raw_g: Any, raw_beta: Any, A_log: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
    of_channels = softplus(raw_g[0].float() + bias.view(raw_g.shape[2:]))
    return torch.exp(-A_log.exp()[:, None] * of_channels), raw_beta[0].float().sigmoid()


def chunked(
    q: Any, k: Any, v: Any, raw_g: Any, raw_beta: Any, A_log: Any, g_bias: Any, initial_state: Any, cu_seqlens: Any,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    decay, beta = gates(raw_g, raw_beta, A_log, g_bias)
    states, outputs, starts = initial_state.clone(), torch.empty_like(v), cu_seqlens.tolist()
    for state, start, end in zip(states, starts, starts[1:], strict=False):
        mine = slice(start, end)
        outputs[0, mine] = recurrence(q[0, mine], k[0, mine], v[0, mine], decay[mine], beta[mine], state)
    return outputs, states


def packed_decode(
    mixed_qkv: Any, raw_g: Any, raw_beta: Any, A_log: Any, dt_bias: Any, initial_state: Any, state_indices: Any,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    decay, beta = gates(raw_g, raw_beta, A_log, dt_bias)
    q, k, v = mixed_qkv.view(len(mixed_qkv), 3, *decay.shape[1:]).unbind(1)
    outputs = torch.empty_like(v)
    for at, row in enumerate(state_indices.tolist()):
        one, state = slice(at, at + 1), initial_state[row]
        outputs[one] = recurrence(q[one], k[one], v[one], decay[one], beta[one], state)
    return outputs[None], initial_state


def convolved(x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """The convolution of inputs ``[channels, tokens]`` behind the last inputs before them, which it replaces."""
    known = torch.cat([history, x], 1)
    history.copy_(known[:, x.shape[1] :])
    return silu(torch.einsum("cnw,cw->cn", known.unfold(1, weight.shape[1], 1), weight))


def convolution(
    x: Any, weight: Any, bias: Any, conv_states: Any, query_start_loc: Any, cache_indices: Any, has_initial_state: Any,
    **others: Any,
) -> torch.Tensor:  # fmt: skip
    output, starts = torch.empty_like(x), query_start_loc.tolist()
    for number, row in enumerate(cache_indices.tolist()[: len(starts) - 1]):
        mine = slice(starts[number], starts[number + 1])
        if not has_initial_state[number]:
            conv_states[row].zero_()
        output[:, mine] = convolved(x[:, mine], weight, conv_states[row])
    return output


def convolution_of_one(
    x: Any, conv_state: Any, weight: Any, bias: Any, conv_state_indices: Any, out: Any, **others: Any
) -> torch.Tensor:
    result: torch.Tensor = out
    for at, row in enumerate(conv_state_indices.tolist()):
        result[at] = convolved(x[at][:, None], weight, conv_state[row])[:, 0]
    return result


def gathered(states: torch.Tensor, rows: torch.Tensor, has_initial_state: torch.Tensor) -> torch.Tensor:
    return torch.where(has_initial_state[:, None, None, None], states[rows.long()], 0)


def with_rotated(heads: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    return torch.cat([heads, rotated.view(len(heads), -1, rotated.shape[-1]).expand(-1, heads.shape[1], -1)], -1)


def write(latent: Any, rotated: Any, pages: Any, slots: Any) -> None:
    known = slots >= 0
    pages.view(-1, pages.shape[-1])[slots[known]] = torch.cat([latent, rotated.flatten(1)], -1)[known]


def keys_and_write(q: Any, plain: Any, rotated: Any, latent: Any, pages: Any, slots: Any, *nope: None) -> torch.Tensor:
    write(latent, rotated, pages, slots)
    return with_rotated(plain, rotated)


def queries_and_write(
    plain: Any, turned: Any, latent: Any, rotated: Any, pages: Any, slots: Any, **nope: None
) -> torch.Tensor:
    write(latent, rotated, pages, slots)
    return torch.cat([plain, turned], -1)


def gather_context(layer: Any, chunk: Any, pages: torch.Tensor, prefill: Any, is_fp8: bool) -> None:
    """By the operator that other layers with MLA call on CPUs."""
    gather = importlib.import_module("vllm._custom_ops").gather_mla_context_cache_cpu
    gather(
        src_cache=pages,
        dst=prefill.chunked_context.workspace[: chunk.num_context_tokens],
        block_table=prefill.block_table[chunk.request_slice],
        starts=chunk.starts,
        cu_seq_lens=chunk.cu_seq_lens,
    )


def nothing(*given: Any) -> None:
    pass


def keep_prefixes() -> None:
    """vLLM has no prefix cache for MLA on CPUs, and computes no prompt in parts; here it does."""
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    check = platform.check_and_update_config

    def check_and_keep(cls: Any, config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        check(config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept

    platform.check_and_update_config = classmethod(check_and_keep)
    # A block may be several of the kernel's, as elsewhere in vLLM.
    backend: Any = importlib.import_module("vllm.v1.attention.backends.mla.cpu_mla").CPUMLABackend
    backend.supports_block_size = classmethod(lambda cls, size: size is None or size % 16 == 0)


def keep_weights() -> None:
    """Linear layers on CPUs keep their weights in the usual form, too: this layer's MLA reads them."""
    utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, False)


def put_in_place(gain: str) -> None:
    draw_wide_weights(gain)
    keep_prefixes()
    keep_weights()
    setattr(torch.cuda, "Stream", SimpleNamespace)  # noqa: B010
    replaced: dict[str, dict[str, Any]] = {
        KDA: {"chunk_kda_with_fused_gate": chunked, "fused_recurrent_kda_packed_decode": packed_decode},
        LAYER: {
            "causal_conv1d_fn": convolution,
            "causal_conv1d_update": convolution_of_one,
            "gather_initial_states": gathered,
        },
        MODEL: dict.fromkeys(("maybe_init_gemm_rs_ar", "enable_kimi_k3_low_latency_gemm"), nothing),
        ATTENTION: {
            "fused_mla_key_concat_kv_cache_insert": keys_and_write,
            "fused_mla_decode_q_concat_kv_cache_insert": queries_and_write,
            "fused_mla_kv_concat": with_rotated,
        },
    }
    for module, functions in replaced.items():
        for name, function in functions.items():
            setattr(importlib.import_module(module), name, function)
    importlib.import_module(ATTENTION).MultiHeadLatentAttention._gather_context_latent = gather_context
    # What it says of itself is wrong for contexts.
    importlib.import_module(PREFILL).CPUSDPAMLAPrefillBackend.supports_out = lambda self: False
