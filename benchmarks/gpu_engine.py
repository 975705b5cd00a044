"""What only an engine on a GPU can tell: start-up checks of other kinds of models, and times to first token."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.hardware_check import SETTINGS, start_row
from benchmarks.report import Row, row
from benchmarks.texts import Sizes, Texts
from benchmarks.timing import ratios

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
CHECKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "proofs_moe_bf16": ("a mixture of experts in bfloat16", MIXTURE, {}),
    "proofs_fp8": ("a model with weights of 8-bit floats", {}, {"quantization": "fp8"}),
    "proofs_fp8_kv": (
        "a model with KV in 8-bit floats, with small scales",
        {},
        {"kv_cache_dtype": "fp8", "arrange": ["benchmarks.gpu_engine:small_scales"]},
    ),
}
"""Rows about the start of an engine: the kind of model, changes to its configuration, options of the engine."""
CONTEXT = 32_768
FIRST_TOKENS = {
    "ttft_full_s": ("time to first token of a full prefill, model of 8B", "s"),
    "ttft_moved_15": ("of moved documents, 15% recomputed, to that of a full prefill", "x the time"),
}
LARGE = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
}
"""The shape of a model of 8B; its weights are vLLM's dummies, because only times are measured."""
DOCUMENTS, STEP = 15, 8192
"""The documents of a prompt, and the tokens of an engine's step."""
ROUNDS = 3
SMALL_SCALE = 2.0**-5

StartEngine = Callable[..., AbstractContextManager[Any]]
"""Takes changes to the model's configuration as ``model``, and options of the engine."""


def rows(start: StartEngine, context: int = CONTEXT, large: Mapping[str, int] = LARGE) -> list[Row]:
    if not find_spec("vllm"):
        why = "vllm is not installed: no engine was started"
        return [row(id, why, "", [], better="lower") for id in (*CHECKS, *FIRST_TOKENS)]
    return [*_checks(start), *_first_tokens(start, context, large)]


def _checks(start: StartEngine) -> Iterator[Row]:
    for id, (kind, model, options) in CHECKS.items():
        try:
            with start(model=model, **options) as engine:
                engine.one([10, 11, 12])
                yield start_row(id, f"start-up checks of {kind}", engine.log)
        except Exception as error:  # whatever an engine ends with belongs into the report
            yield row(id, f"no engine with {kind} starts: {error}", "", [], better="lower")


def _first_tokens(start: StartEngine, context: int, large: Mapping[str, int]) -> list[Row]:
    """Times of prompts of about ``context`` tokens, in turn without reuse and with documents in a new order."""
    length = context // (DOCUMENTS + 1)
    texts = Texts(1, Sizes(DOCUMENTS, length, 32, 32, 1000))
    # Keys and values of 16 bits in heads of 128 items; the arena also has room for chunks that are not full.
    kv_bytes = context * large["num_hidden_layers"] * large["num_key_value_heads"] * 2 * 2 * 128
    settings = SETTINGS | {"hub": {"arena_gib": 0.25 + 1.5 * kv_bytes / 2**30, "metrics": ""}}
    options = {"max_model_len": context + STEP, "max_num_batched_tokens": STEP, "gpu_memory_utilization": 0.6}
    model = {**large, "max_position_embeddings": context + STEP}
    answers: dict[str, list[Any]] = {"off": [], "blend": []}
    values: dict[str, list[float]] = {}
    why = ""
    try:
        with start(model=model, settings=settings, load_format="dummy", **options) as engine:
            texts.store(engine)
            for _ in range(ROUNDS + 1):
                for mode, of_mode in answers.items():
                    engine.forget()
                    of_mode.append(engine.one(texts.shuffled(), mode=mode, recompute_ratio=0.15, store=False))
        report = answers["blend"][-1].report
        if report.get("moved_tokens") != DOCUMENTS * length:
            raise RuntimeError(f"text was not reused where it had moved: {report}")
        full, moved = ([answer.first_token_s for answer in of_mode[1:]] for of_mode in answers.values())
        # The first round warms up.
        values = {"ttft_full_s": full, "ttft_moved_15": ratios(moved, full)}
    except Exception as error:
        why = f"not measured: {error}: "
    return [
        row(id, f"{why}{what}, {context:,} tokens", unit, values.get(id, []), better="lower")
        for id, (what, unit) in FIRST_TOKENS.items()
    ]


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
