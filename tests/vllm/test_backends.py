"""The attention backends that vLLM prefers on Hopper and Blackwell: the documentation has a verdict on each, and the
metadata that BlendHub has their builders make says of each span what it says of a request.
"""

import ast
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from blendhub.core.spans import Span
from blendhub.vllm.model.attention_metadata import AttentionMetadata
from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
from blendhub.vllm.model.upstream import Upstream
from harness.engines.shapes import DEEPSEEK, QWEN3
from tests.stand_in import StandIn

CUDA = importlib.util.find_spec("vllm.platforms.cuda")
DOCS = Path(__file__).parents[2] / "docs" / "backends.md"
PAGE = 64
SIZES = ("get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes")


def preferred() -> set[str]:
    """The backends in vLLM's own lists. Their module asks for a GPU, so the function alone is taken from it."""
    tree = ast.parse(Path(CUDA.origin).read_text())
    function: Any = next(one for one in tree.body if getattr(one, "name", "") == "_get_backend_priorities")
    function.decorator_list, function.args = [], _without_types(function.args)
    function.returns = None
    names: dict[str, Any] = {"AttentionBackendEnum": AttentionBackendEnum}
    exec(compile(ast.Module([function], []), CUDA.origin, "exec"), names)
    found = set()
    for major in (9, 10):
        for mla, kv, heads, head_size, media in (
            (False, None, None, None, False),
            (False, None, None, None, True),
            (True, "auto", 128, 576, False),
            (True, "fp8", 16, 512, False),
        ):
            asked = {"num_heads": heads, "kv_cache_dtype": kv, "head_size": head_size, "use_mm_prefix": media}
            asked = {name: value for name, value in asked.items() if name in {one.arg for one in function.args.args}}
            found |= {one.name for one in names["_get_backend_priorities"](mla, DeviceCapability(major, 0), **asked)}
    return found


def _without_types(arguments: ast.arguments) -> ast.arguments:
    for one in [*arguments.args, *arguments.kwonlyargs]:
        one.annotation = None
    return arguments


def test_every_backend_that_vllm_prefers_has_a_verdict():
    table = re.search(r"\| attention backend \|.*?\n\n", DOCS.read_text(), re.DOTALL)[0]
    missing = {name for name in preferred() if f"`{name}`" not in table}
    assert len(preferred()) > 10 and not missing


PATHS = {
    "FLASH_ATTN": "flash_attn.FlashAttention",
    "TRITON_ATTN": "triton_attn.TritonAttention",
    "TRITON_MLA": "mla.triton_mla.TritonMLA",
    "FLASHMLA": "mla.flashmla.FlashMLA",
    "FLASH_ATTN_MLA": "mla.flashattn_mla.FlashAttnMLA",
    "FLASHINFER_MLA": "mla.flashinfer_mla.FlashInferMLA",
    "TOKENSPEED_MLA": "mla.tokenspeed_mla.TokenspeedMLA",
}
"""FlashInfer's and FlexAttention's builders serve engines in test_engine_runners.py, and CUTLASS_MLA has the one that
all of MLA share."""


def backend_of(name, monkeypatch):
    """The backend's own Python, without what is compiled for GPUs."""
    for missing in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(fa_utils, missing, getattr(fa_utils, missing, None), raising=False)
    for part, names in (("", ()), (".decode", ("trtllm_batch_decode_with_kv_cache_mla",)), (".utils", SIZES)):
        stand_in = ModuleType(f"flashinfer{part}")
        vars(stand_in).update(dict.fromkeys(names))
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    place, _, kind = f"vllm.v1.attention.backends.{PATHS[name]}Backend".rpartition(".")
    module = importlib.import_module(place)
    monkeypatch.setattr(module, "get_flash_attn_version", lambda *given, **named: 2, raising=False)
    monkeypatch.setattr(module, "get_mla_metadata", lambda *given, **named: (None, None), raising=False)
    monkeypatch.setattr(module, "num_compute_units", lambda *given: 132, raising=False)
    return getattr(module, kind)


class Prefill:
    """What MLA's builders ask of the backend for prefills."""

    requires_v_padding = False

    def clone(self):
        return self

    def __getattr__(self, name):
        return lambda *given, **named: None


@pytest.mark.parametrize("name", PATHS)
def test_a_span_is_to_the_backend_what_a_request_is(name, monkeypatch, tmp_path):
    is_mla = "MLA" in name
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK if is_mla else QWEN3))
    backend = backend_of(name, monkeypatch)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": PAGE, "max_model_len": 1024}
    config = EngineArgs(str(tmp_path), **options).create_engine_config()
    dims = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
    layer = SimpleNamespace(**dims, num_heads=4, prefill_backend=Prefill())
    config.compilation_config.static_forward_context["layer"] = layer
    shape: dict[str, Any] = {"block_size": PAGE, "dtype": torch.bfloat16}
    spec = (
        MLAAttentionSpec(num_kv_heads=1, head_size=576, **shape)
        if is_mla
        else FullAttentionSpec(num_kv_heads=2, head_size=32, **shape)
    )
    with set_current_vllm_config(config):
        theirs = AttentionGroup(backend, ["layer"], spec, 0)
        theirs.create_metadata_builders(config, torch.device("cpu"), PAGE)
        runner = StandIn(
            block_groups=[SimpleNamespace(kv_cache_spec=spec)],
            attention_groups=[[theirs]],
            kernel_block_sizes=[PAGE],
            device=torch.device("cpu"),
        )
        metadata = AttentionMetadata(runner, Upstream(), config)
        first = RequestTokens(np.zeros(700, np.uint32), [np.arange(20, 31)], [Span(0, 600), Span(640, 641)])
        second = RequestTokens(np.zeros(300, np.uint32), [np.arange(40, 45)], [Span(130, 131), Span(200, 203)])
        chosen = RecomputeSet([first, second])
        slots = torch.from_numpy(chosen.slots(PAGE))
        found = metadata.build(chosen, torch.from_numpy(chosen.positions), [slots])["layer"]
    # The spans of one token come first.
    ends, lengths = [641, 131, 203, 600], [1, 1, 3, 600]
    assert found.num_actual_tokens == len(chosen) == sum(lengths)
    parts = [found.decode, found.prefill] if is_mla else [found]
    tables = torch.cat([part.block_table[:, :3] for part in parts])
    assert tables.tolist() == [[20, 21, 22], [40, 41, 42], [40, 41, 42], [20, 21, 22]]
    if not is_mla:
        assert found.seq_lens.tolist() == ends and found.query_start_loc.diff().tolist() == lengths
        return
    decodes = found.num_decodes
    assert decodes >= 2 and found.decode.seq_lens.tolist() == ends[:decodes]
    assert found.prefill.query_start_loc.diff().tolist() == lengths[decodes:]
    contexts = [end - n for end, n in zip(ends, lengths, strict=True)][decodes:]
    # The keys before a span are gathered from the pages; a prompt's first span has none.
    chunked = found.prefill.chunked_context
    assert (chunked.context_lens_list if chunked else [0] * len(contexts)) == contexts
