"""Arrangements of a test's engine: what is called in its process, before vLLM makes the engine or while it runs.

``Engine(arrange=arrange(signal_the_hub, ...))`` calls a function before the start, and ``inside(engine, fail_loads)``
while the engine waits. Tests import this module without vLLM: each function imports what it changes.
"""

import gc
import importlib
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from blendhub import Span
from harness.engines import Engine, dummy_weights

COUNTS: Counter[str] = Counter()
"""The counts that functions of this module keep in an engine's process."""
KEPT: dict[str, Any] = {}
"""What functions have replaced in an engine's process, by name."""


def arrange(function: Callable[..., Any], *arguments: str) -> list[str]:
    """How ``Engine`` is told to call a function of this module."""
    return [f"{__name__}:{function.__name__}", *arguments]


def inside(engine: Engine, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of this module in an engine's process."""
    return engine.call("inside", *arrange(function), *arguments)


def counted() -> dict[str, int]:
    """What was counted since the last call."""
    counts = dict(COUNTS)
    COUNTS.clear()
    return counts


# Of vLLM


def leave_the_sampler_uncompiled() -> None:
    """For 20 s of a core in each engine's process; the model is compiled as everywhere."""
    sampler: Any = importlib.import_module("vllm.v1.sample.sampler")
    sampler.batched_count_greater_than = sampler.batched_count_greater_than._torchdynamo_orig_callable


def count_drafts() -> None:
    """Count what a speculating engine proposes and accepts."""
    scheduler: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    make = scheduler.make_spec_decoding_stats

    def count(self: Any, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *rest: Any, **named: Any) -> Any:
        COUNTS.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return make(self, stats, num_draft_tokens, num_accepted_tokens, *rest, **named)

    scheduler.make_spec_decoding_stats = count


def draw_wide_weights(by_device: str = "", gain: str = "") -> None:
    """Have vLLM draw large dummy weights; ``by_device``: and chosen tokens attend by the device."""
    dummy_weights.draw_wide_weights(gain)
    if by_device:
        attend_on_device()


# Of the adapter


def wait_patiently() -> None:
    """Later prompts wait for a lookup and a load however long that takes: a test of order is none of speed."""
    from blendhub.vllm.scheduler import blend_queue, loads

    blend_queue.MIN_WAIT_S = 60.0
    loads.LOOKUP_WAIT_S = 10.0


def fail_loads(fails: bool) -> None:
    """Whether every copy of stored KV to the engine fails from now on."""
    layer_copies: Any = importlib.import_module("blendhub.vllm.worker.layer_copies")
    load = KEPT.setdefault("load", layer_copies.LayerCopies.load)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("the accelerator is lost")

    layer_copies.LayerCopies.load = fail if fails else load


def spoil_arena() -> None:
    """Overwrite all that is stored. It is no number: what is computed from it is none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    arena = connector._worker._client.arena
    arena.bytes[: arena.progress().reserved] = 0xFF


def fail_repairs(fails: bool) -> None:
    """Whether every forward of a repair fails from now on."""
    from blendhub.vllm.worker.doubts import Doubts
    from blendhub.vllm.worker.repairs import Repairs

    kept = KEPT.setdefault("repairs", (Repairs._hidden, Doubts._compute))

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no memory is left")

    hidden, compute = (fail, fail) if fails else kept
    setattr(Repairs, "_hidden", hidden)  # noqa: B010
    setattr(Doubts, "_compute", compute)  # noqa: B010


def unfinished_repairs() -> int:
    """Count the requests of which the worker waits for repaired KV."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return sum(record.repair is not None or record.is_repairing for record in connector._worker._requests.values())


def fail_builders() -> None:
    """The attention backend makes no second builder of metadata, as one of a new kind may not."""
    engine_model: Any = importlib.import_module("blendhub.vllm.model.engine_model")

    def refuse(*arguments: object) -> None:
        raise ValueError("there is one workspace only")

    engine_model.AttentionMetadata = refuse


def note_forwards() -> None:
    """Count BlendHub's forwards, their spans, and the most requests that one serves. May be called again."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    model = connector._worker._context.model
    if "forward" in vars(model):
        return
    forward = model.forward

    def noted(chosen: Any, **named: Any) -> Any:
        COUNTS["most requests"] = max(COUNTS["most requests"], len(chosen.parts))
        COUNTS.update(forwards=1, spans=len(chosen.spans))
        return forward(chosen, **named)

    model.forward = noted


def prefer_neighbours(n: int) -> None:
    """The engine's attention computes so many neighbours in about the time of one, as far as selectors know."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    connector._worker._context.device.block_tokens = n


def attention_received(tokens: list[int], askers: list[Span], stored: list[Span]) -> list[float]:
    """What the stored tokens receive of the attention of some tokens, as a selector is told by an engine's probe."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from blendhub.vllm.model.attention_probe import AttentionQuery
    from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens

    connector: Any = get_kv_transfer_group()
    context = connector._worker._context
    blocks = np.arange(1, 2 + len(tokens) // context.model.block_sizes[0])[::-1].copy()
    part = RequestTokens(np.array(tokens, np.uint32), [blocks], [Span(0, len(tokens))])
    context.model.forward(RecomputeSet([part]))  # the KV of the whole prompt is in its pages
    with torch.inference_mode():
        # Beside another prompt, whose numbers are not its own.
        other = AttentionQuery(part._replace(spans=[Span(9, 13)]), [Span(0, 9)])
        asking = AttentionQuery(part._replace(spans=askers), stored)
        received: list[float] = context.attention.received([other, asking])[1].tolist()
    return received


def attend_on_device(long: str = "") -> None:
    """Chosen tokens attend by the device, in plain torch, but for spans that are so ``long``."""
    leave_the_sampler_uncompiled()
    from blendhub.contracts import ChosenAttention
    from blendhub.testing.attention_reference import ReferenceAttention

    device: Any = importlib.import_module("blendhub_cpu.device").CpuDevice
    choice: Any = importlib.import_module("blendhub.vllm.worker.start.attention_choice")
    attach = device.attach

    def attach_and_remember(self: Any, *attached: Any) -> None:
        attach(self, *attached)
        self.attached = [*getattr(self, "attached", ()), attached]

    def attention(self: Any, rules: Any, dtype: Any, group: int) -> ChosenAttention:
        layers, block_size, layout = self.attached[group]
        return ReferenceAttention(layers, block_size, layout, rules)

    device.attach, device.attention = attach_and_remember, attention
    compared = choice._compared
    choice._compared = lambda *given: (compared(*given), (0.0, 1.0))[1]
    compared_long = choice._compared_for_long_spans
    choice._compared_for_long_spans = lambda *given: (compared_long(*given), (1.0, 0.0) if long else (0.0, 1.0))[1]
    choice.LONG_TOKENS = int(long or choice.LONG_TOKENS)


def attend_long_by_engine(long: int | None) -> None:
    """How long the spans are from now on that attend by the engine and not by the device."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    connector._worker._context.model.long_span = long


def note_states() -> None:
    """Keep the states of recurrent layers that the last load of an engine has ended with."""
    from blendhub.vllm.worker.connector_worker import ConnectorWorker

    finish: Any = ConnectorWorker._finish

    def noted(self: Any, load: Any, result: Any) -> None:
        job = load.job
        KEPT["states"] = _states(self._context.model, job.blocks), job.tokens[: job.decision.end]
        finish(self, load, result)

    setattr(ConnectorWorker, "_finish", noted)  # noqa: B010


def spoil_states() -> None:
    """From now on, the states with which a request goes on behind moved text are twice as large as they should be.

    Those of tiny models are hardly off by themselves, so that nothing would show that they are repaired.
    """
    from blendhub.vllm.worker.connector_worker import ConnectorWorker

    finish: Any = KEPT.setdefault("finish", ConnectorWorker._finish)

    def spoiled(self: Any, load: Any, result: Any) -> None:
        model = self._context.model
        for name, (table, _) in model.recurrent.items() if load.job.decision.maps else ():
            for part in model.layer(name).kv_cache:
                part[int(load.job.blocks[table][0])] *= 2
        finish(self, load, result)

    setattr(ConnectorWorker, "_finish", spoiled)  # noqa: B010


def poison_blocks() -> None:
    """Nothing in vLLM's blocks, which are all free, is a number, as if the bytes of states had stood there."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    for layer in connector._worker._context.layers:
        for pages in layer.paged.tensors:
            pages.fill_(float("nan"))


def error_of_states() -> tuple[float, float]:
    """How far the noted states are off from those of the same tokens, all of which the model computes: relative to
    these, the worst layer. And how far off these are, computed in two parts."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from blendhub.vllm.model.recompute_set import RecomputeSet, RequestTokens
    from blendhub.vllm.model.states.state_path import StatePath

    connector: Any = get_kv_transfer_group()
    model = connector._worker._context.model
    noted, tokens = KEPT["states"]
    tables = [np.arange(1, model.n_blocks)[: 1 + len(tokens) // size] for size in model.block_sizes]
    for table in {table for table, _ in model.recurrent.values()}:
        tables[table] = np.array([model.n_blocks - 1 - table])  # groups share the memory of their blocks

    def computed(*borders: int) -> list[torch.Tensor]:
        for start, end in itertools.pairwise(borders):
            part = RequestTokens(tokens, tables, [Span(start, end)], StatePath(start, end))
            model.forward(RecomputeSet([part]))
        return _states(model, tables)

    def error(states: list[torch.Tensor]) -> float:
        return max(float((a - b).norm() / b.norm()) for a, b in zip(states, whole, strict=True))

    n = len(tokens)
    whole = computed(0, n)
    return error(noted), error(computed(0, n // 3, n))


def _states(model: Any, tables: Any) -> list[Any]:
    return [
        part[int(tables[table][0])].float().clone()
        for name, (table, _) in model.recurrent.items()
        for part in model.layer(name).kv_cache
    ]


# Of the hub


def stored_states() -> list[int]:
    """Behind how many tokens the embedded hub has states of recurrent layers, ascending."""
    from blendhub.hub.index.namespace_index import Chunk

    chunks = [item for item in gc.get_objects() if isinstance(item, Chunk)]
    return sorted(chunk.span.end for chunk in chunks if chunk.run.provenance.has_state and chunk.offset is not None)


def signal_the_hub(order: str) -> None:
    """Send the hub's process a signal at a moment that a test writes into the file ``order``.

    "Release sent 1234 19": process 1234 gets signal 19 just before the next message of that name is sent; "Release
    answered 1234 19": just after its answer was read.
    """
    from blendhub.client.answer import Answer
    from blendhub.client.hub_client import HubClient

    client, answer = cast(Any, HubClient), cast(Any, Answer)

    def obey(name: str, moment: str) -> None:
        try:
            said = Path(order).read_text().split()
        except OSError:
            return
        if said[:2] == [name, moment]:
            Path(order).unlink()
            os.kill(int(said[2]), int(said[3]))

    ask, done = client._ask, answer.done

    def ask_obediently(self: Any, read: Any, message: Any, *rest: Any, **named: Any) -> Any:
        obey(type(message).__name__, "sent")
        return ask(self, read, message, *rest, **named)

    def done_obediently(self: Any, within: float = 0.0) -> bool:
        was_pending, is_done = self.pending is not None, done(self, within)
        if was_pending and is_done:
            obey(type(self.request).__name__, "answered")
        return bool(is_done)

    client._ask, answer.done = ask_obediently, done_obediently


# Of ranks


def ranks(place: str = "", gain: str = "") -> None:
    """Ranks are forked from the engine's process, which has imported vLLM, instead of importing it each.

    ``place``: a folder in which a file named like a rank orders what happens to it: its next "copy" to pages fails, or
    its next "forward" finds no memory. Copies end late there, on each rank at another time, those of the layers that
    probes read before the others; it is told if the engine waits for one, and if it probes beside one. ``gain``: of
    dummy weights.
    """
    import torch

    executor: Any = importlib.import_module("vllm.v1.executor.multiproc_executor")
    if gain:
        dummy_weights.draw_wide_weights(gain)
    if place:
        _obey_orders(Path(place))
    start_worker = executor.WorkerProc.worker_main

    def on_one_core(*arguments: Any, **named: Any) -> None:
        torch.set_num_threads(1)
        start_worker(*arguments, **named)

    # vLLM spawns ranks on CPUs alone. Its variables that bind threads to cores are read by processes that start.
    executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    executor.WorkerProc.worker_main = staticmethod(on_one_core)


def _obey_orders(place: Path) -> None:
    import torch
    from blendhub_cpu.device import CpuDevice
    from vllm.distributed.parallel_state import get_tp_group

    from blendhub.contracts import Transfer
    from blendhub.vllm.model import layer_groups
    from blendhub.vllm.model.engine_model import EngineModel

    layer_groups.LEAST_BYTES = 0
    copying: set[Transfer] = set()

    def is_ordered(what: str) -> bool:
        """Whether this rank's order, which is taken then, is that what fails."""
        order = place / str(get_tp_group().rank_in_group)
        ordered = order.exists() and order.read_text() == what
        if ordered:
            order.unlink()
        return ordered

    class LateTransfer(Transfer):
        def __init__(self, copy: Transfer, fails: bool) -> None:
            self._copy = copy
            self._fails = fails
            self._asks = 3 + 6 * get_tp_group().rank_in_group
            copying.add(self)

        def done(self) -> bool:
            self._asks -= 1
            return self._asks <= 0

        def wait(self) -> None:
            if self._asks > 0:
                print("the engine waited for a copy", flush=True)
            copying.discard(self)
            self._copy.wait()
            if self._fails:
                # As CUDA does, for any earlier error.
                raise RuntimeError("CUDA error: a copy failed on this rank")

    device, model = cast(Any, CpuDevice), cast(Any, EngineModel)
    load, forward, probe = device.load, model.forward, model.forward_until

    def forward_or_fail(*arguments: Any, **named: Any) -> Any:
        if is_ordered("forward"):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return forward(*arguments, **named)

    def probe_and_tell(*arguments: Any, **named: Any) -> Any:
        if copying:
            print("a probe ran beside a copy", flush=True)
        return probe(*arguments, **named)

    device.overlaps_compute, model.forward, model.forward_until = True, forward_or_fail, probe_and_tell
    device.load = lambda *arguments, **named: LateTransfer(load(*arguments, **named), is_ordered("copy"))
