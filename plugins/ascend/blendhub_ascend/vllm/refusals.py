"""What BlendHub does not serve on Ascend NPUs, with a sentence for each."""

from typing import Any

import vllm.envs
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_ascend.ascend_config import get_ascend_config

from blendhub.core.errors import Unsupported
from blendhub.vllm.model.platform import keeps_latent

SERVED = ("AscendAttentionBackendImpl", "AscendMLAImpl")
REFUSED = {
    "AscendAttentionBackendImpl310": "the 310P keeps KV in a private format (NZ); serve without BlendHub there",
    "AscendC8AttentionBackendImpl": "KV in int8 (C8) is not supported; serve with KV in the model's dtype",
    "AscendFAImpl": "the FA3 attention backend is not supported; serve with vllm-ascend's usual backend",
    "AscendSFAImpl": "sparse attention (SFA) keeps an index beside keys and values, which BlendHub does not store",
    "AscendDSAImpl": "sparse attention (DSA) lets layers share pages, which BlendHub does not know",
}
"""By the class of a layer's ``impl``. Backends are no guide: with VLLM_USE_V2_MODEL_RUNNER all have the same name."""
OPTIONS = {
    "enable_kv_nz": "keeps the latent in a private format (NZ)",
    "enable_hamming_sparse": "keeps hashes beside the keys, which BlendHub does not store",
    "enable_sp_by_pass": "spreads the tokens of a forward over the ranks",
    "enable_flashcomm2_parallel_size": "spreads the tokens of a forward over the ranks",
}
"""Keys of vLLM's ``additional_config``, and what they do that rules BlendHub out."""


def refuse(runner: Any, config: VllmConfig) -> None:
    """Raise Unsupported for a configuration in which stored KV would be wrong, or could not be written."""
    if vllm.envs.VLLM_USE_V2_MODEL_RUNNER:
        raise Unsupported(
            "VLLM_USE_V2_MODEL_RUNNER is set, but vllm-ascend's second model runner does not work with vLLM 0.23; "
            "unset it"
        )
    ascend = get_ascend_config()
    for option, reason in OPTIONS.items():
        if getattr(ascend, option, None):
            raise Unsupported(f"additional_config.{option} {reason}; leave it out to reuse KV")
    if ascend.xlite_graph_config.enabled:
        raise Unsupported("additional_config.xlite_graph_config replaces the model's forward; leave it out")
    specs = [group.kv_cache_spec for groups in runner.attn_groups for group in groups]
    if len(runner.attn_groups) > 1 or not all(isinstance(spec, FullAttentionSpec) for spec in specs):
        raise Unsupported(
            "vLLM 0.23 hears of a load that failed by its blocks, which do not tell what has left an attention window; "
            "with --disable-hybrid-kv-cache-manager text is reused if some layers have no window"
        )
    for layer in config.compilation_config.static_forward_context.values():
        _refuse_layer(config, layer)


def _refuse_layer(config: VllmConfig, layer: Any) -> None:
    impl = getattr(layer, "impl", None)
    if impl is None:
        return  # no attention: the metadata's check names it
    kind = type(impl).__name__
    if kind not in SERVED:
        raise Unsupported(f"{layer.layer_name}: {REFUSED.get(kind, f'the attention {kind} is not known to BlendHub')}")
    if not keeps_latent(layer):
        return
    if getattr(impl, "fa_quant_layer", False):
        raise Unsupported(f"{layer.layer_name}: the quantised latent (FA quantisation) is not supported")
    if config.kv_transfer_config and config.kv_transfer_config.kv_role == "kv_consumer":
        raise Unsupported(
            "kv_role is kv_consumer, for which vllm-ascend fuses MLA's preprocessing (MLAPO) and drops the weights "
            "that BlendHub's forwards need; use kv_role kv_both"
        )
    if not config.scheduler_config.enable_chunked_prefill:
        raise Unsupported("MLA reads earlier KV in a prefill only if chunked prefill is on; enable_chunked_prefill")
