"""What only an engine on a GPU can tell: times to first token, saves that fail, start-up checks of other models.

Rows come one by one, the most wanted first, so that a run that is cut off has told something.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from operator import call
from typing import Any

import torch

from benchmarks.hardware_check import SETTINGS, start_row
from benchmarks.report import Row, row
from benchmarks.texts import Sizes, Texts
from benchmarks.timing import in_turn, ratios, seconds
from harness.engines import Engine
from harness.engines.shapes import GPT_OSS

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
WINDOWS = GPT_OSS | {"head_dim": 64, "sliding_window": 128, "torch_dtype": "bfloat16"}
DUMMY = {"load_format": "dummy"}
CHECKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "proofs_moe_bf16": ("a mixture of experts in bfloat16", MIXTURE, {}),
    "proofs_fp8": ("a model with weights of 8-bit floats", {}, {"quantization": "fp8"}),
    "proofs_fp8_kv": (
        "a model with KV in 8-bit floats, with small scales",
        {},
        {"kv_cache_dtype": "fp8", "arrange": ["benchmarks.gpu_engine:small_scales"]},
    ),
    **{f"proofs_gpt_oss_{n}": ("gpt-oss, whose windows have sinks", WINDOWS, DUMMY) for n in range(1, 6)},
}
"""Rows about the start of an engine: the kind of model, changes to its configuration, options of the engine. The checks
of gpt-oss hang on rounding, so they run five times."""
CONTEXTS = (2048, 8192, 32_768)
LARGE = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
}
"""The shape of a model of 8B; its weights are vLLM's dummies, because only times are measured."""
DOCUMENTS, DOCUMENT_TOKENS, STEP = 15, 512, 8192
"""The most documents of a prompt, the least tokens of one, and the tokens of an engine's step."""
ROUNDS = 3
SMALL_SCALE = 2.0**-5
PINNED_S = 120

StartEngine = Callable[..., AbstractContextManager[Engine]]
"""Takes changes to the model's configuration as ``model``, and options of the engine."""


def rows(start: StartEngine, contexts: Sequence[int] = CONTEXTS, large: Mapping[str, int] = LARGE) -> Iterator[Row]:
    if not find_spec("vllm"):
        yield row("engines", "vllm is not installed: no engine was started", "", [])
        return
    for name, of_part in {"first_tokens": _first_tokens(start, contexts, large), "checks": _checks(start)}.items():
        try:
            yield from of_part
        except Exception as error:  # whatever an engine ends with belongs into the report
            yield Row(name, f"not measured: {error}", None, "", None, "lower", False, None)


def _first_tokens(start: StartEngine, contexts: Sequence[int], large: Mapping[str, int]) -> Iterator[Row]:
    """Prompts in turn without reuse, and with documents in a new order, as BlendHub does by default."""
    longest = max(contexts)
    # Keys and values of 16 bits in heads of 128 items; the arena also has room for chunks that are not full.
    kv_bytes = sum(contexts) * large["num_hidden_layers"] * large["num_key_value_heads"] * 2 * 2 * 128
    arena_gib = 0.25 + 1.5 * kv_bytes / 2**30
    # What takes longer than prefill is refused.
    settings = SETTINGS | {"hub": {"arena_gib": arena_gib, "metrics": ""}, "policy": {"min_donor_context": 0}}
    options = {"max_model_len": longest + STEP, "max_num_batched_tokens": STEP, "gpu_memory_utilization": 0.6}
    model = {**large, "max_position_embeddings": longest + STEP}
    with start(model=model, settings=settings, load_format="dummy", **options) as engine:
        yield start_row("engine_large", "start-up checks of a model of 8B", engine.log)
        _wait_until_pinned(engine, arena_gib)
        for context in contexts:
            count = min(DOCUMENTS, context // DOCUMENT_TOKENS - 1)
            texts = Texts(context, Sizes(count, context // (count + 1), 32, 32, 1000))
            stored_s = seconds(partial(texts.store, engine))
            gigabytes = kv_bytes / sum(contexts) * count * texts.sizes.document_tokens / 1e9
            reports = list[dict[str, Any]]()

            def first_token_s(texts: Texts = texts, reports: list[dict[str, Any]] = reports, **asked: Any) -> float:
                engine.forget()
                answer = engine.one(texts.shuffled(), store=False, **asked)
                reports.append(answer.report)
                return answer.first_token_s

            ways: dict[str, dict[str, Any]] = {
                "full": {"mode": "off"},
                "moved": {},
                "moved_15": {"recompute_ratio": 0.15},
            }
            timed = in_turn({way: partial(first_token_s, **asked) for way, asked in ways.items()}, ROUNDS, call)
            moved, computed = (reports[-1].get(name) for name in ("moved_tokens", "recomputed_tokens"))
            at, full = f"{context // 1024}k", timed["full"]
            yield row(
                f"store_gb_s_{at}", "KV of documents that are computed and stored", "GB/s", [gigabytes / stored_s]
            )
            what = f"time to first token of a full prefill, model of 8B, {context:,} tokens"
            yield row(f"ttft_full_{at}", what, "s", full, better="lower")
            what = f"of moved documents ({moved} tokens moved, {computed} recomputed at 15%), to a full prefill"
            yield row(f"ttft_moved_{at}", f"{what}, by default", "x", ratios(timed["moved"], full), 1.05, "lower")
            yield row(f"ttft_moved_15_{at}", f"{what}, 15%", "x", ratios(timed["moved_15"], full), None, "lower")
        failed = sum(count for name, count in engine.call("counts").items() if name.startswith("saves_failed"))
        yield row("saves_failed", "saves that failed in this engine", "", [failed], 0, "lower")


def _checks(start: StartEngine) -> Iterator[Row]:
    for id, (kind, model, options) in CHECKS.items():
        try:
            with start(model=model, **options) as engine:
                engine.one([10, 11, 12])
                yield start_row(id, f"start-up checks of {kind}", engine.log)
        except Exception as error:
            yield row(id, f"no engine with {kind} starts: {error}", "", [], better="lower")


def _wait_until_pinned(engine: Engine, arena_gib: float) -> None:
    """KV waits for memory that is not reserved yet, for a minute in some virtual machines, and takes a slower way while
    it is not pinned. An engine also pins a little at its start, to measure."""
    until = time.monotonic() + PINNED_S
    while torch.cuda.is_available() and time.monotonic() < until:
        goals = map(int, re.findall(r"of the arena's (\d+) (?:are pinned|MiB could not be pinned)", engine.log))
        if max(goals, default=0) >= int(1024 * arena_gib):
            return
        time.sleep(0.5)


def small_scales() -> None:
    """Runs in an engine's process before vLLM makes the engine: keys and values in 8-bit floats get a small scale."""
    from vllm.model_executor.layers.attention import attention

    set_scales = attention.set_default_quant_scales

    def set_small_scales(layer: Any, register_buffer: bool = False) -> None:
        set_scales(layer, register_buffer)
        for name in ("k", "v"):
            getattr(layer, f"_{name}_scale").fill_(SMALL_SCALE)
            setattr(layer, f"_{name}_scale_float", SMALL_SCALE)
            setattr(layer, f"_{name}_scale_cpu", torch.tensor(SMALL_SCALE))

    setattr(attention, "set_default_quant_scales", set_small_scales)  # noqa: B010
