"""A worker's side of the connector under a played engine; its device loads in a stream of the deferring runtime.

What the engine submits in a step is a task of the runtime, which runs only if something waits for it. So a test sees
whether a copy waits for the step's forward.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from blendhub import Span
from blendhub.contracts import PageSegment, Segment, Transfer
from blendhub.testing.devices.deferred import DeferredRuntime, Task
from blendhub.vllm.model.layer_groups import attach
from blendhub.vllm.worker.connector_worker import ConnectorWorker
from harness.waiting import wait_until
from tests.vllm.blending import context_of
from tests.vllm.played_engine import BLOCK, HOST, LAYOUT, NAMESPACE, SETTINGS, PlayedEngine, played_engine
from tests.vllm.stand_in_model import StandInModel


class SideTransfer(Transfer):
    def __init__(self, device: "SideDevice", end: Task) -> None:
        self._device = device
        self._end = end

    def done(self) -> bool:
        """The machine takes up to ten tasks further between two polls."""
        return not self._device.is_held and any(self._device.runtime.query(self._end) for _ in range(10))

    def wait(self) -> None:
        assert self.done(), "a step waits for a copy"
        if self._device.error:
            raise self._device.error


class SideDevice(CpuDevice):
    """Loads beside the engine's work, after what it had submitted before."""

    overlaps_compute = True

    def __init__(self) -> None:
        super().__init__(CpuOptions())
        self.runtime = DeferredRuntime()
        self.runtime.set_device()
        self.is_held = False
        """No load ends while this is true."""
        self.error: Exception | None = None
        """What loads and the pinning of the arena raise."""
        self.pins = 0
        self.loads: list[tuple[int, int]] = []
        """For each load, where its first segment begins, and how many tokens the device was told to skip."""
        self._stream = self.runtime.create_stream()

    def pin(self, arena: np.ndarray, progress: Any = None) -> None:
        if self.error:
            raise self.error
        super().pin(arena)
        self.pins += 1

    def begin_step(self) -> None:
        self._step_begins = self.runtime.record_event()

    def load(
        self, segments: Sequence[Segment | PageSegment], blocks: Any, skip_prefix_n_tokens: int = 0, group: int = 0
    ) -> Transfer:
        self.loads.append((segments[0].span.start, skip_prefix_n_tokens))
        self.runtime.wait_event(self._stream, self._step_begins)
        super_load = super().load
        self._stream.submit(lambda: super_load(segments, blocks, skip_prefix_n_tokens, group).wait())
        return SideTransfer(self, self.runtime.record_event(self._stream))


class PlayedWorker:
    """A worker with a separate session and a model, by default of one layer, and vLLM's runner around it."""

    def __init__(self, engine: PlayedEngine, device: SideDevice, model: Any = None) -> None:
        self.engine = engine
        self.device = device
        self.model = model or StandInModel(n_layers=1, heads=LAYOUT.kv_heads, width=LAYOUT.key_dim, n_blocks=64)
        self.forwards: list[int] = []
        """The steps whose forwards have run."""
        self.steps = 0
        context = context_of(self.model, device=device)
        attach(device, context.groups, context.layers)
        self.worker = ConnectorWorker(context, HOST, "engine", SETTINGS.lookup_timeout_s)

    @property
    def kv(self) -> Any:
        """The pages that requests may have."""
        return self.model.pages[0][1:]

    def store(self, name: str, prompt: list[int]) -> None:
        """A request that vLLM computes in one step and that has ended then, until all of it is in the hub."""
        request, output = self.engine.arrived(name, prompt), SchedulerOutput.make_empty()
        self.engine.turn(request)
        blocks = (self.engine.blocks.blocks,)
        self.engine.side.allocated(request, blocks, 0)
        output.num_scheduled_tokens[name] = output.total_num_scheduled_tokens = len(prompt)
        self.step(output=output)
        request.num_computed_tokens = len(prompt)
        request.append_output_token_ids(1)
        self.engine.side.ended(request, blocks)
        wait_until(lambda: not self.step() and len(self.engine.found(prompt, exact=True)) == len(prompt), 30, 1e-3)

    def arrive(self, name: str, prompt: list[int], first_block: int = 1, local: int = 0) -> Request:
        """A request whose load is in the next step's plan. ``local``: so many of its first tokens vLLM has cached."""
        request = self.engine.arrived(name, prompt)
        until, n_external = time.monotonic() + 30, None
        while n_external is None:  # the hub may be slow on a busy machine
            assert time.monotonic() < until
            n_external, _ = self.engine.turn(request, local)
        assert n_external
        blocks = list(range(first_block, first_block - (-(local + n_external) // BLOCK)))
        self.engine.side.allocated(request, (blocks,), n_external)
        return request

    def step(self, *, computes: bool = True, output: SchedulerOutput | None = None) -> set[str]:
        """A step, with a forward if it ``computes``, in the order of vLLM's runners; returns whose KV has arrived.

        The hub answers between the hooks.
        """
        self.steps += 1
        self.device.runtime.synchronize(self.device.runtime.record_event())  # the machine has done the steps before
        plan = self.engine.side.plan(output or SchedulerOutput.make_empty())
        plan.computes = computes
        self.worker.begin_step(plan)
        number = self.steps
        self.device.runtime.engine.submit(lambda: self.forwards.append(number))
        self._let_the_hub_answer()
        self.worker.load(plan)
        self._let_the_hub_answer()
        self.worker.save(plan)
        _, loaded = self.worker.finished()
        if report := self.worker.take_report():
            self.engine.side.process_report(report)
        return loaded

    def until_loaded(self, name: str) -> None:
        """Steps until the load of a request has ended, however long the hub takes."""
        until = time.monotonic() + 30
        while name not in self.step():
            assert time.monotonic() < until
            time.sleep(1e-3)

    def failed(self) -> list[str]:
        """The requests whose loads have failed."""
        return [job.request for job in self.worker.take_failed()]

    def _let_the_hub_answer(self) -> None:
        """Replies of a connection come in order: behind this one, all are there."""
        for client in (self.engine.client, self.worker._client):
            if client and client.is_up:
                client.stats().result()

    def start(self) -> None:
        """The steps that vLLM takes before there is a request."""
        until = time.monotonic() + 60
        while self.engine.side.has_work:
            assert time.monotonic() < until
            self.step()
            time.sleep(1e-3)


@contextmanager
def played_worker(device: SideDevice, stored: list[int], **config: Any) -> Iterator[PlayedWorker]:
    """A worker that has taken its first steps, and a hub that has stored this text; every byte of its KV is 1.

    ``config`` are keys of the hub's configuration.
    """
    with played_engine(rank=-1, **config) as engine:
        with engine.hub.connect() as writer:
            writer.register("engine", NAMESPACE, 0)
            reserved = writer.reserve(np.asarray(stored, np.uint32), Span(0, len(stored))).result()
            writer.arena.bytes[:] = 1
            writer.commit(reserved.right, len(stored)).result()
        with worker_of(engine, device) as worker:
            yield worker


@contextmanager
def worker_of(engine: PlayedEngine, device: SideDevice, model: Any = None) -> Iterator[PlayedWorker]:
    """The only worker of this engine, after its first steps."""
    worker = PlayedWorker(engine, device, model)
    worker.start()
    yield worker
    worker.worker.close()
