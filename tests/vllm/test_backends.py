"""The attention backends that vLLM prefers on Hopper and Blackwell: the metadata that BlendHub has their builders make
says of each span what it says of a request.
"""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import fa_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from blendhub.core.spans import Span
from blendhub.vllm.model.attention_metadata import AttentionMetadata
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.model.upstream import Upstream
from harness.engines.shapes import DEEPSEEK, QWEN3
from tests.stand_in import StandIn

PAGE = 64
BACKENDS = [
    "flash_attn.FlashAttention",
    "triton_attn.TritonAttention",
    "mla.triton_mla.TritonMLA",
    "mla.flashmla.FlashMLA",
    "mla.flashattn_mla.FlashAttnMLA",
    "mla.flashinfer_mla.FlashInferMLA",
    "mla.tokenspeed_mla.TokenspeedMLA",
]
"""FlashInfer's and FlexAttention's builders serve engines in test_engine_runners.py, and CUTLASS_MLA has the one that
all of MLA share."""


def backend_of(path, monkeypatch):
    """The backend's own Python, without what is compiled for GPUs."""
    for missing in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(fa_utils, missing, getattr(fa_utils, missing, None), raising=False)
    sizes = ("get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes")
    for part, names in (("", ()), (".decode", ("trtllm_batch_decode_with_kv_cache_mla",)), (".utils", sizes)):
        stand_in = ModuleType(f"flashinfer{part}")
        vars(stand_in).update(dict.fromkeys(names))
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    place, _, kind = f"vllm.v1.attention.backends.{path}Backend".rpartition(".")
    module = importlib.import_module(place)
    for name, answer in (("get_flash_attn_version", 2), ("get_mla_metadata", (None, None)), ("num_compute_units", 132)):
        monkeypatch.setattr(module, name, lambda *given, answer=answer, **named: answer, raising=False)
    return getattr(module, kind)


class Prefill:
    """What MLA's builders ask of the backend for prefills."""

    requires_v_padding = False

    def clone(self):
        return self

    def __getattr__(self, name):
        return lambda *given, **named: None


@pytest.mark.parametrize("path", BACKENDS)
def test_a_span_is_to_the_backend_what_a_request_is(path, monkeypatch, tmp_path):
    is_mla = path.startswith("mla")
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK if is_mla else QWEN3))
    backend = backend_of(path, monkeypatch)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": PAGE, "max_model_len": 1024}
    config = EngineArgs(str(tmp_path), **options).create_engine_config()
    dims = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    layer = SimpleNamespace(**dims, num_heads=4, prefill_backend=Prefill())
    config.compilation_config.static_forward_context["layer"] = layer
    kind, heads, width = (MLAAttentionSpec, 1, 576) if is_mla else (FullAttentionSpec, 2, 32)
    spec = kind(block_size=PAGE, dtype=torch.bfloat16, num_kv_heads=heads, head_size=width)
    with set_current_vllm_config(config):
        theirs = AttentionGroup(backend, ["layer"], spec, 0)
        theirs.create_metadata_builders(config, torch.device("cpu"), PAGE)
        runner = StandIn(
            block_groups=[SimpleNamespace(kv_cache_spec=spec)],
            attention_groups=[[theirs]],
            kernel_block_sizes=[PAGE],
            device=torch.device("cpu"),
        )
        first = RequestTokens(np.zeros(700, np.uint32), [np.arange(20, 31)], [Span(0, 600), Span(640, 641)])
        second = RequestTokens(np.zeros(300, np.uint32), [np.arange(40, 45)], [Span(130, 131), Span(200, 203)])
        chosen = RecomputeSet([first, second])
        slots = torch.from_numpy(chosen.slots(PAGE))
        positions = torch.from_numpy(chosen.positions)
        made = AttentionMetadata(runner, Upstream(), config).build(chosen, positions, [slots])["layer"]
    # The spans of one token come first.
    ends, lengths = [641, 131, 203, 600], [1, 1, 3, 600]
    assert made.num_actual_tokens == len(chosen) == sum(lengths)
    parts = [made.decode, made.prefill] if is_mla else [made]
    tables = torch.cat([part.block_table[:, :3] for part in parts])
    assert tables.tolist() == [[20, 21, 22], [40, 41, 42], [40, 41, 42], [20, 21, 22]]
    if not is_mla:
        assert made.seq_lens.tolist() == ends and made.query_start_loc.diff().tolist() == lengths
        return
    decodes = made.num_decodes
    assert decodes >= 2 and made.decode.seq_lens.tolist() == ends[:decodes]
    assert made.prefill.query_start_loc.diff().tolist() == lengths[decodes:]
    contexts = [end - n for end, n in zip(ends, lengths, strict=True)][decodes:]
    # The keys before a span are gathered from the pages; a prompt's first span has none.
    chunked = made.prefill.chunked_context
    assert (chunked.context_lens_list if chunked else [0] * len(contexts)) == contexts
