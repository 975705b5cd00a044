"""What benchmarks do inside an engine's process: time BlendHub's forwards and vLLM's steps, with kernels or without.

Each function is called by ``engine.call("inside", "benchmarks.inside_engine:NAME", ...)``.
"""

import gc
import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch

STEPS: defaultdict[int, list[float]] = defaultdict(list)
"""The host's seconds of vLLM's steps, by their number of tokens."""

DECIDING: dict[int, Any] = {}
"""The costs by which schedulers decide, while they decide without."""


def forwards(sizes: list[int], runs: int, replays: bool) -> dict[int, tuple[float, float]]:
    """For each number of tokens the host's seconds of a forward, and the seconds until the device has computed it: both
    the medians of so many runs. The tokens stand behind as many others of a prompt."""
    from blendhub.core.spans import Span
    from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens

    model, taken = _context().model, dict[int, tuple[float, float]]()
    for n in sizes:
        tables = [np.arange(1, 2 + 2 * n // size) for size in model.block_sizes]
        tokens = np.arange(2 * n, dtype=np.uint32) % 97
        chosen = RecomputeSet([RequestTokens(tokens, tables, [Span(n, 2 * n)])])
        times: list[tuple[float, float]] = []
        for _ in range(2 + runs):  # the first may compile, and allocate memory
            _synchronize(model.device)
            started = time.perf_counter()
            model.forward(chosen, replays=replays)
            launched = time.perf_counter()
            _synchronize(model.device)
            times.append((launched - started, time.perf_counter() - started))
        host, device = zip(*times[2:], strict=True)
        taken[n] = statistics.median(host), statistics.median(device)
    return taken


def time_steps() -> None:
    """Take the host's time of each step of vLLM from now on."""
    runner: Any = _context().model._runner._runner
    execute = runner.execute_model

    def execute_and_time(step: Any, *given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        output = execute(step, *given, **named)
        STEPS[step.total_num_scheduled_tokens].append(time.perf_counter() - started)
        return output

    runner.execute_model = execute_and_time


def steps(n_tokens: int) -> list[float]:
    """The seconds of the steps that have computed so many tokens."""
    return STEPS[n_tokens]


def decide_by_time(is_on: bool) -> None:
    """Whether reuse that would take longer than a prefill is refused."""
    from blendhub.vllm.scheduler.loads import LoadScheduler

    for loads in (item for item in gc.get_objects() if isinstance(item, LoadScheduler)):
        DECIDING.setdefault(id(loads), loads._costs)
        loads._costs = DECIDING[id(loads)] if is_on else None


def stub_kernels() -> None:
    """Have the model compute nothing but calls of its attention, which compute nothing either: what is left is what the
    host does for a forward whose pieces between attention are single launches."""
    model: Any = _context().model
    layers = [model.layer(name) for name in model.layer_names]
    names = [layer.layer_name for layer in layers]
    for layer in layers:
        layer.impl.forward = layer.impl.do_kv_cache_update = lambda *given, **named: None
    first, most = layers[0], model.max_tokens
    queries = torch.zeros(most, first.num_heads, first.head_size, dtype=model.dtype)
    keys = torch.zeros(most, first.num_kv_heads, first.head_size, dtype=model.dtype)
    output, hidden = torch.zeros_like(queries), torch.zeros(most, model.config.model_config.get_hidden_size())
    hidden = hidden.to(model.dtype)

    def compute(input_ids: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        n = len(positions)
        for name in names:
            torch.ops.vllm.unified_kv_cache_update(keys[:n], keys[:n], name)
            torch.ops.vllm.unified_attention_with_output(queries[:n], keys[:n], keys[:n], output[:n], name)
        return hidden[:n]

    predicted = torch.zeros(1, model.config.model_config.get_vocab_size(), dtype=model.dtype)
    model.module.forward = compute
    model.module.compute_logits = lambda hidden, *given: predicted.expand(len(hidden), -1).clone()


def _context() -> Any:
    """What the blends of the engine's only worker share."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return connector._worker._context


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
