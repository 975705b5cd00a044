"""What only an engine on a GPU can tell of other models: whether their start-up checks pass. Also how engines start."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.hardware_check import start_row
from benchmarks.report import Row, row
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
SMALL_SCALE = 2.0**-5
PINNED_S = 120

StartEngine = Callable[..., AbstractContextManager[Engine]]
"""Takes changes to the model's configuration as ``model``, and options of the engine."""


def checks(start: StartEngine) -> Iterator[Row]:
    for id, (kind, model, options) in CHECKS.items():
        try:
            with start(model=model, **options) as engine:
                engine.one([10, 11, 12])
                yield start_row(id, f"start-up checks of {kind}", engine.log)
        except Exception as error:
            yield row(id, f"no engine with {kind} starts: {error}", "", [], better="lower")


def wait_until_pinned(engine: Engine, arena_gib: float) -> None:
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
