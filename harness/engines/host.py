"""One vLLM engine in this process, which does what is asked through a pipe.

vLLM makes one engine in a process well, and no second one after it. Imports nothing of BlendHub at the top, so that
it also works with an interpreter that has vLLM but not BlendHub.
"""

import gc
import importlib
import os
import sys
import time
import traceback
import zlib
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Host:
    """The engine, and a look at what it does inside."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._engine = LLM(model, **{"skip_tokenizer_init": True} | options).llm_engine
        core: Any = getattr(self._engine.engine_core, "engine_core")  # noqa: B009  (only the client of this process has it)
        self._core = core
        self._scheduler = core.scheduler
        # With several ranks the workers are in processes of their own.
        driver = getattr(core.model_executor, "driver_worker", None)
        self._runner = driver.worker.model_runner if driver else None
        self._blocks: dict[str, tuple[list[int], ...]] = {}
        self._preempted = 0
        self._number = 0
        self._counts: Counter[str] = Counter()  # of seconds, too
        self._keeps_kv = False
        self._kept: dict[str, Any] = {}
        self._remember_blocks()
        self._count_preemptions()
        self._keep_counts()
        self._pause_as_served()
        self.settle()  # BlendHub starts within the first steps

    def ask(
        self,
        prompts: list[list[int]],
        asked: list[dict[str, Any]],
        tokens: int,
        abort_after: float | None,
        keep_kv: bool,
    ) -> list[dict[str, Any] | None]:
        """All prompts at once; None in place of what was aborted before it had an answer."""
        self._keeps_kv = keep_kv
        started = time.perf_counter()
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        finished: dict[str, Any] = {}
        ids = [self._add(prompt, one, tokens) for prompt, one in zip(prompts, asked, strict=True)]
        while self._engine.has_unfinished_requests():
            if abort_after is not None and time.perf_counter() - started > abort_after:
                self._engine.abort_request(ids)
                abort_after = None
            for output in self._engine.step():
                first.setdefault(output.request_id, time.perf_counter() - started)
                if output.finished:
                    finished[output.request_id] = output
                    last[output.request_id] = time.perf_counter() - started
        self.settle()
        return [self._told(finished.get(id), first.get(id), last.get(id)) for id in ids]

    def serve_in_turn(self, prompts: list[list[int]], at_once: int, tokens: int) -> tuple[list[list[float]], float]:
        """Ask so many prompts at a time. Of each prompt, the seconds from then on until each token; and the seconds
        until all were answered.

        Time in which this thread could have run, and the machine had no core for it, does not count.
        """
        began, added = _own_time(), dict[str, float]()
        times: dict[str, list[float]] = {}
        n_ended = 0
        while n_ended < len(prompts):
            for prompt in prompts[len(added) : n_ended + at_once]:
                added[self._add(prompt, {"logprobs": 0}, tokens)] = _own_time()
            for output in self._engine.step():
                times.setdefault(output.request_id, []).append(_own_time() - added[output.request_id])
                n_ended += output.finished
        whole = _own_time() - began
        self.settle()
        return [*times.values()], whole

    def settle(self) -> None:
        """Step until everything that has ended is saved, and its blocks are free."""
        until = time.monotonic() + 30
        while (self._scheduler.has_requests() or self._core.batch_queue) and time.monotonic() < until:
            self._engine.step()
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        # vLLM 0.23 makes no more steps when the blocks are free, and the hub may still hear of what they held.
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        saves = getattr(getattr(connector, "_worker", None), "_saves", None)
        while saves and any(record.saves for record in saves._requests.values()) and time.monotonic() < until:
            saves.go_on()
            time.sleep(0.001)

    def beside(
        self, decoding: list[list[int]], decoded: int | None, prompt: list[int], asked: dict[str, Any], tokens: int
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None, list[float]]:
        """A request while others decode so many tokens each, or until it has ended: its answer and that of the first of
        the others, and the times between two tokens of that one after the request came.

        Time in which this thread could have run, and the machine had no core for it, does not count.
        """
        others = [self._add(one, {"store": False, "mode": "off"}, decoded or 10_000) for one in decoding]
        answer: Any = None
        stream: Any = None
        gaps_s: list[float] = []
        added_at = 0.0
        first_s: float | None = None
        ended_s: float | None = None
        request = ""
        last = _own_time()
        while self._engine.has_unfinished_requests():
            outputs: Any = self._engine.step()
            for output in outputs:
                now = _own_time()
                if output.request_id == others[0]:
                    if request:
                        gaps_s.append(now - last)
                    stream, last = output, now
                elif output.request_id == request:
                    first_s = first_s or now - added_at
                    if output.finished:
                        answer, ended_s = output, now - added_at
                        if decoded is None:
                            self._engine.abort_request(others)
            if not request and stream and len(stream.outputs[0].token_ids) > 8:
                added_at = _own_time()
                request = self._add(prompt, asked, tokens)
        self.settle()  # a request's blocks are known when they are free
        return self._told(answer, first_s, ended_s), self._told(stream, None), gaps_s

    def batches_in_flight(self) -> int:
        """How many batches vLLM may have scheduled before it hears of the first: two if it schedules asynchronously."""
        return int(self._core.batch_queue_size) if self._core.batch_queue is not None else 1

    def kv(self, request: str, n: int) -> Any:
        """``[layers, 2, n, heads, width]`` of a request's first ``n`` tokens, from the blocks that it had."""
        if request in self._kept:
            return self._kept[request][:, :, :n]
        import numpy as np
        import torch

        from blendhub.vllm.model.layer_groups import layer_groups, pages_of
        from blendhub.vllm.model.pages import read

        model, at = self._model(), np.arange(n)
        both = []
        for name, layer in zip(model.layer_names, pages_of(model, layer_groups(model, 256)), strict=True):
            table = model.tables[name]
            size, blocks = model.block_sizes[table], np.asarray(self._blocks[request][table], np.int64)
            both.append(read(layer, torch.from_numpy(blocks[at // size] * size + at % size)))
        # With one vector for both (MLA), there are no values apart.
        return torch.stack([torch.stack([k, v if v.numel() else k]) for k, v in both]).float().cpu().numpy()

    def states(self, request: str) -> Any:
        """The parts of the states of recurrent layers behind a request's last computed token."""
        model, tables = self._model(), self._blocks[request]
        return [
            part[tables[table][-1]].float().cpu().numpy()
            for name, (table, _) in model.recurrent.items()
            for part in model.layer(name).kv_cache
        ]

    def _model(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        from blendhub.vllm.model.engine_model import EngineModel

        connector: Any = KVConnectorFactory.get_connector_class_by_name("BlendHubConnector")
        config = self._engine.vllm_config
        return EngineModel(self._runner, config, connector._new_platform(self._runner, config))

    def forget(self) -> bool:
        """Empty vLLM's own prefix cache; false if blocks are still held."""
        return bool(self._scheduler.reset_prefix_cache())

    def load_in_place(self, lora: str) -> None:
        """Have vLLM read an adapter anew, as its server does where ``load_inplace`` is asked."""
        self._engine.add_lora(_lora_request(lora, load_inplace=True))

    def preemptions(self) -> int:
        return self._preempted

    def inside(self, function: str, *arguments: Any) -> Any:
        """The result of a function, given as ``module:function``, called in this process."""
        return _called(function, *arguments)

    def counts(self) -> dict[str, Any]:
        """What BlendHub has counted, and the seconds that it took, since the engine's start."""
        if self._scheduler.connector:
            self._scheduler.connector.get_kv_connector_stats()
        return dict(self._counts)

    def close(self) -> float:
        """End the engine; how many seconds that took."""
        started = _own_time()
        self._engine.engine_core.shutdown()
        return _own_time() - started

    def _add(self, prompt: list[int], asked: dict[str, Any], tokens: int) -> str:
        from vllm import SamplingParams

        self._number += 1
        asked = dict(asked)
        salt, lora, stop = (asked.pop(name, None) for name in ("cache_salt", "lora", "stop_token_ids"))
        logprobs, forced, more = asked.pop("logprobs", 20), asked.pop("forced", None), asked.pop("sampling", {})
        transfer = asked.pop("transfer", {}) | ({"blendhub": asked} if asked else {})
        extra = {"kv_transfer_params": transfer} if transfer else {}
        if forced:
            extra["forced"] = forced
        usual = {"temperature": 0, "ignore_eos": True, "stop_token_ids": stop, "logprobs": logprobs}
        sampling = SamplingParams(**(usual | more), max_tokens=tokens, extra_args=extra or None)
        request: Any = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        adapter = _lora_request(lora) if lora else None
        self._engine.add_request(f"request-{self._number}-", request, sampling, lora_request=adapter)
        return f"request-{self._number}-"

    def _remember_blocks(self) -> None:
        manager = self._scheduler.kv_cache_manager

        def remembering(free: Any) -> Any:
            def remember(request: Any) -> Any:
                self._blocks[request.request_id] = manager.get_block_ids(request.request_id)
                if self._keeps_kv:
                    self._kept[request.request_id] = self.kv(request.request_id, request.num_computed_tokens)
                return free(request)

            return remember

        # Blocks that a step in flight still writes are taken from a request first, and are free later.
        for name in ("free", "pop_blocks_for_free"):
            if free := getattr(manager, name, None):
                setattr(manager, name, remembering(free))

    def _pause_as_served(self) -> None:
        """Have steps that compute nothing end with a pause in which other threads run, as in vLLM's server."""
        step = self._core.step_fn

        def step_and_pause() -> Any:
            outputs, has_computed = step()
            if not has_computed and self._scheduler.has_requests():
                time.sleep(0.001)
            return outputs, has_computed

        self._core.step_fn = step_and_pause

    def _count_preemptions(self) -> None:
        preempt = self._scheduler._preempt_request

        def counted(*given: Any, **named: Any) -> None:
            self._preempted += 1
            preempt(*given, **named)

        self._scheduler._preempt_request = counted

    def _keep_counts(self) -> None:
        """Keep BlendHub's counts, which vLLM takes and drops where it logs no statistics."""
        connector = self._scheduler.connector
        if type(connector).__name__ in ("NoneType", "MultiConnector"):
            return
        take = connector.get_kv_connector_stats

        def taken() -> Any:
            stats = take()
            self._counts.update(stats.reduce() if stats else {})
            return stats

        connector.get_kv_connector_stats = taken

    def _told(self, output: Any, first_token_s: float | None, ended_s: float | None = None) -> dict[str, Any] | None:
        if output is None or not output.outputs[0].token_ids:
            return None
        answer = output.outputs[0]
        return {
            "id": next(id for id in self._blocks if id.startswith(output.request_id)),
            "tokens": list(answer.token_ids),
            "logprobs": [{token: one.logprob for token, one in likely.items()} for likely in answer.logprobs],
            "report": (output.kv_transfer_params or {}).get("blendhub", {}),
            "transfer": output.kv_transfer_params or {},
            "first_token_s": first_token_s,
            "ended_s": ended_s,
            "cached": output.num_cached_tokens,
        }


def _lora_request(lora: str | tuple[str, str], *, load_inplace: bool = False) -> Any:
    """A LoRA request, by the adapter's directory, which is its name, too, or by both: name and directory."""
    from vllm.lora.request import LoRARequest

    name, path = (lora, lora) if isinstance(lora, str) else lora
    return LoRARequest(name, zlib.crc32(f"{name}\0{path}".encode()) % 10_000 + 1, path, load_inplace=load_inplace)


def _own_time() -> float:
    """A clock that stands while the machine has no core for this thread."""
    try:
        waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        waited_ns = 0  # a system without such statistics
    return time.perf_counter() - waited_ns / 1e9


def _called(function: str, *arguments: Any) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def mend_llvmlite() -> None:
    """vLLM looks into every object of every module, and stumbles over llvmlite's library, which has every attribute."""
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    found = ffi._lib_wrapper.__getattr__

    def look(library: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return found(library, name)

    ffi._lib_wrapper.__getattr__ = look


def _allow_asynchronous_scheduling() -> None:
    """Allow asynchronous scheduling, the default on GPUs, which vLLM turns off on CPUs whatever was asked for."""
    from vllm.platforms.cpu import CpuPlatform

    check: Any = CpuPlatform.check_and_update_config

    def check_all_but_scheduling(cls: type[CpuPlatform], config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check.__func__(cls, config)
        config.scheduler_config.async_scheduling = asked

    setattr(CpuPlatform, "check_and_update_config", classmethod(check_all_but_scheduling))  # noqa: B010


def _set(variables: dict[str, str]) -> None:
    """Set environment variables. Python has read PYTHONPATH at its start, and torch its number of threads."""
    import torch

    if "OMP_NUM_THREADS" in variables:
        torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    searched = variables["PYTHONPATH"].split(os.pathsep) if "PYTHONPATH" in variables else []
    sys.path[:0] = searched
    os.environ |= variables | {"PYTHONPATH": os.pathsep.join(filter(None, [*searched, os.environ.get("PYTHONPATH")]))}


def serve(line: Connection) -> None:
    """Start an engine, and do what is asked through the pipe until it is closed."""
    import torch

    try:
        variables, arrange, model, options = line.recv()
        _set(variables)
        if arrange:
            _called(*arrange)
        _allow_asynchronous_scheduling()
        # vLLM would look for garbage among all objects at its end, which is the end of this process.
        setattr(gc, "unfreeze", lambda: None)  # noqa: B010
        if options["enforce_eager"]:
            # Otherwise vLLM compiles how it counts likely tokens, which takes each engine three seconds.
            torch.compiler.set_stance("force_eager")
        host = Host(model, options)
    except Exception as error:
        line.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise
    line.send("ready")
    while True:
        try:
            method, arguments = line.recv()
        except EOFError:
            return
        try:
            answer = getattr(host, method)(*arguments)
        except Exception as error:
            traceback.print_exc()
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        line.send(answer)
        if method == "close":
            return
