"""What only an engine on a GPU can tell: start-up checks of other kinds of models, and what forwards of ours cost."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.engine_check import start_row
from benchmarks.report import Row, missing_row, row
from blendhub import Span

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CHECKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "proofs_moe_bf16": ("a mixture of experts in bfloat16", MIXTURE, {}),
    "proofs_fp8": ("a model with weights of 8-bit floats", {}, {"quantization": "fp8"}),
}
"""Rows about the start of an engine: the kind of model, changes to its configuration, options of the engine."""
COSTS = {
    "forward_host_ms": ("the host's time for a forward of BlendHub's own over spans of 32 tokens", "ms"),
    "attention_256_spans": ("a forward over spans of 32 tokens, to one over as many tokens in one span", "x the time"),
}
CONTEXT, SPAN, EVERY = 32_768, 32, 128
"""256 spans of 32 tokens over a context of 32,768, and one span of 8,192 tokens at its end."""

StartEngine = Callable[..., AbstractContextManager[Any]]
"""Takes changes to the model's configuration as ``model``, and options of the engine."""


def rows(start: StartEngine, context: int = CONTEXT) -> list[Row]:
    if not find_spec("vllm"):
        why = "vllm is not installed: no engine was started"
        return [missing_row(id, why, "", None, "lower") for id in (*CHECKS, *COSTS)]
    return [*_checks(start), *_costs(start, context)]


def _checks(start: StartEngine) -> Iterator[Row]:
    for id, (kind, model, options) in CHECKS.items():
        try:
            with start(model=model, **options) as engine:
                engine.one([10, 11, 12])
                yield start_row(id, f"start-up checks of {kind}", engine.log)
        except Exception as error:  # whatever an engine ends with belongs into the report
            yield missing_row(id, f"no engine with {kind} starts: {error}", "", None, "lower")


def _costs(start: StartEngine, context: int) -> list[Row]:
    tokens = context // EVERY * SPAN
    options = {"max_model_len": context, "max_num_batched_tokens": max(tokens, 1024)}
    try:
        with start(model={"max_position_embeddings": context}, **options) as engine:
            engine.one([10, 11, 12])
            short, long = engine.call("inside", "benchmarks.gpu_engine:forward_seconds", context)
    except Exception as error:
        return [missing_row(id, f"not measured: {error}", "", None, "lower") for id in COSTS]
    values = {
        "forward_host_ms": [host * 1e3 for host, _ in short],
        "attention_256_spans": [some / one for (_, some), (_, one) in zip(short, long, strict=True)],
    }
    return [row(id, what, unit, values[id], better="lower") for id, (what, unit) in COSTS.items()]


def forward_seconds(context: int, repeats: int = 10) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Runs in the engine: seconds on the host and in all, of forwards over many short spans and over one long span."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from blendhub.vllm.model.chosen import Chosen, Part

    connector: Any = get_kv_transfer_group()
    model = connector._worker._context.model
    short = [Span(end - SPAN, end) for end in range(EVERY, context + 1, EVERY)]
    long = [Span(context - SPAN * len(short), context)]
    tokens = np.full(context, 10, np.uint32)
    # Block 0 is vLLM's own; what the others hold is of no request, and is forgotten with the engine.
    blocks = np.arange(1, context // model.block_size + 1)

    def timed(spans: Sequence[Span]) -> tuple[float, float]:
        _synchronize()
        started = time.perf_counter()
        model.forward(Chosen([Part(tokens, [blocks], spans)]))
        host = time.perf_counter() - started
        _synchronize()
        return host, time.perf_counter() - started

    for spans in (short, long):  # the first compiles
        timed(spans)
    in_turn = [(timed(short), timed(long)) for _ in range(repeats)]
    return [one for one, _ in in_turn], [one for _, one in in_turn]


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
