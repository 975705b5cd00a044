"""The conformance suite of devices with streams: missing synchronisation shows every time. Needs torch."""

import gc
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pytest
import torch

from blendhub.contracts import ArenaProgress, Device, PageFormat, Transfer
from blendhub.core.errors import Unsupported
from blendhub.devices import StreamDevice
from blendhub.testing.devices.base import harnesses
from blendhub.testing.devices.deferred import DeferredRuntime, DeferredStream, SlowRegistration, Task
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary

__all__ = ["DeferredRuntime", "StreamSuite"]

MakeHarness: TypeAlias = Callable[..., DeviceHarness]
MonkeyPatch: TypeAlias = pytest.MonkeyPatch

RUNTIMES: Mapping[str, Callable[[], DeferredRuntime]] = {
    "pinned arena": DeferredRuntime,
    "arena that cannot be pinned": lambda: DeferredRuntime("no more locked memory"),
    "arena that kernels do not reach": lambda: DeferredRuntime(host_pointers=False),
}


class Panic(BaseException):
    """An error of the kind that extension modules in Rust raise."""


class RuntimeWithoutWaits(DeferredRuntime):
    """Its streams do not wait for one another."""

    def wait_event(self, stream: DeferredStream, event: Task) -> None:
        pass


class StreamSuite(ABC):
    """Subclass it with a ``create`` that makes a device whose work all goes through the given runtime.

    A device that stages KV should be tested with staging that is smaller than one chunk, so that transfers reuse it.
    """

    formats: ClassVar[tuple[PageFormat, ...]] = Device.formats
    """The page formats that the device supports; the first is used where the format does not matter."""

    fields: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Fields of ``DeviceSetup`` that all tests have, for example widths that the device's fastest kernels take."""

    @abstractmethod
    def create(self, runtime: DeferredRuntime) -> StreamDevice:
        """A new device on this runtime, not attached to anything."""

    def setup(self) -> DeviceSetup:
        sizes = {"chunk_tokens": 40, "n_blocks": 40, "n_shards": 8}
        return DeviceSetup(**{"format": self.formats[0], "rotations": (Rotary(),) * 3, **sizes, **self.fields})

    def harness_on(self, runtime: DeferredRuntime) -> DeviceHarness:
        return DeviceHarness(self.create(runtime), "cpu", self.setup())

    @pytest.fixture(params=RUNTIMES)
    def runtime(self, request: pytest.FixtureRequest) -> DeferredRuntime:
        return RUNTIMES[request.param]()

    @pytest.fixture
    def harness(self, runtime: DeferredRuntime) -> Iterator[DeviceHarness]:
        with harnesses(lambda: self.create(runtime), "cpu") as make:
            harness = make(self.setup())
            wait_until_pinned(harness)
            yield harness

    def test_transfers_follow_the_engine_s_earlier_work(self, harness: DeviceHarness, runtime: DeferredRuntime) -> None:
        load_pages_that_the_engine_has_yet_to_write(harness, runtime)
        save_pages_that_the_engine_has_yet_to_write(harness, runtime)

    def test_a_transfer_that_does_not_follow_the_engine_is_caught(self) -> None:
        """Without its waits the device fails the test before, so that does test its waits."""
        for transfer in (save_pages_that_the_engine_has_yet_to_write, load_pages_that_the_engine_has_yet_to_write):
            runtime = RuntimeWithoutWaits()
            with pytest.raises(AssertionError):
                transfer(self.harness_on(runtime), runtime)

    def test_in_a_step_saves_follow_its_work_and_loads_only_that_before(
        self, harness: DeviceHarness, runtime: DeferredRuntime
    ) -> None:
        harness.device.begin_step()
        forward = runtime.engine.submit(lambda: None)
        harness.start_load(harness.chunks(0, 160, source=50), 30).wait()
        harness.check()
        assert not forward.done
        load_pages_that_the_engine_has_yet_to_write(harness, runtime, then=harness.device.begin_step)
        save_pages_that_the_engine_has_yet_to_write(harness, runtime)

    def test_wait_does_not_wait_for_later_engine_work(self, harness: DeviceHarness, runtime: DeferredRuntime) -> None:
        transfer = harness.start_save(harness.chunks(0, 160))
        later = runtime.engine.submit(lambda: None)
        transfer.wait()
        harness.check()
        assert not later.done

    def test_any_thread_may_use_the_device(self, harness: DeviceHarness) -> None:
        """Each thread sets its device first: CUDA's contexts on other GPUs would cost memory, and ACL fails."""
        device, transfer = harness.device, harness.start_save(harness.chunks(0, 160))
        uses: list[Callable[[], object]] = [
            lambda: device.load([], harness.block_ids).wait(),
            lambda: device.save([], harness.block_ids).wait(),
            lambda: poll(transfer),
            transfer.wait,
            device.close,
        ]
        for use in uses:
            with ThreadPoolExecutor(1) as another_thread:
                another_thread.submit(use).result()
        harness.check()

    def test_pending_transfers_do_not_overwrite_each_other_s_staging(self, harness: DeviceHarness) -> None:
        run_pending_transfers(harness)

    def test_a_replaced_arena_is_released_after_its_copies(
        self, harness: DeviceHarness, runtime: DeferredRuntime
    ) -> None:
        first, expected, was_registered = harness.arena, harness.expected_arena, bool(runtime.registered)
        harness.reference.save(harness.chunks(0, 160), harness.block_ids)
        harness.device.save(harness.chunks(0, 160), harness.block_ids)
        harness.pin_new_arena()
        wait_until_pinned(harness)
        assert np.array_equal(first, expected) and not runtime.errors
        assert sum(map(len, runtime.registered)) == harness.arena.size * was_registered
        harness.device.close()
        assert not runtime.registered and not runtime.errors

    def test_transfers_do_not_wait_until_the_arena_is_pinned(self) -> None:
        """Hosts with hundreds of GiB take minutes."""
        runtime = SlowRegistration()
        harness = self.harness_on(runtime)
        chunks, n_parts = harness.chunks(0, 240), -(-harness.arena.size // runtime.registration_bytes)
        runtime.wait_for_call()
        for n_next in (1, n_parts // 2, 1):
            harness.load(chunks, 10)
            harness.load([harness.segment(7, 30, shard=7, row=2)])
            harness.overwrite_pages()
            harness.save(chunks)
            harness.save([harness.segment(3, 9, shard=7, row=9)])
            runtime.allow(n_next)
        begin = time.perf_counter()
        harness.pin_new_arena()
        assert time.perf_counter() - begin < 0.05
        harness.load(chunks, 10)
        runtime.allow_soon(1)  # the part of the first arena that is being registered
        closing = threading.Timer(0.1, runtime.allow_soon, [1])  # at most one of the new arena
        closing.start()
        harness.device.close()
        closing.join()
        assert not runtime.registered and not runtime.errors

    def test_an_arena_is_pinned_as_far_as_it_is_reserved(self) -> None:
        """Pinning makes pages: behind the reserved part, memory for them may be missing."""
        runtime = DeferredRuntime()
        harness, step = self.harness_on(runtime), runtime.registration_bytes
        size = harness.arena.size
        assert size > 3 * step
        harness.device.pin(harness.arena, lambda: progress)
        progress = ArenaProgress(step, size)
        for reserved, goal in ((2 * step, size), (3 * step, size), (3 * step + 1, 3 * step + 1)):
            harness.load(harness.chunks(0, 240), 10)
            harness.overwrite_pages()
            harness.save(harness.chunks(0, 240))
            progress = ArenaProgress(reserved, goal)
        wait_until_pinned(harness)
        start = harness.arena.ctypes.data
        assert all(part.stop <= start + 3 * step + 1 for part in runtime.registered)
        assert sum(map(len, runtime.registered)) > step, "only the first part was pinned, although more was reserved"
        harness.device.close()
        assert not runtime.registered and not runtime.errors

    def test_what_was_pinned_before_an_error_is_used(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: MonkeyPatch
    ) -> None:
        runtime, register, copied = DeferredRuntime(), DeferredRuntime.register, DeferredRuntime._copied
        addresses: list[int] = []

        def fail_at_the_fourth(runtime: DeferredRuntime, memory: Any) -> str | None:
            return "no more locked memory" if len(runtime.registered) == 3 else register(runtime, memory)

        def note(runtime: DeferredRuntime, memory: torch.Tensor) -> range:
            addresses.append(memory.data_ptr())
            return copied(runtime, memory)

        monkeypatch.setattr(DeferredRuntime, "register", fail_at_the_fourth)
        monkeypatch.setattr(DeferredRuntime, "_copied", note)
        harness = self.harness_on(runtime)
        wait_until_pinned(harness)
        for _ in range(2):
            harness.load(harness.chunks(0, 240), 10)
            harness.overwrite_pages()
            harness.save(harness.chunks(0, 240))
        assert len(runtime.registered) == 3
        assert {one in part for one in addresses for part in runtime.registered} == {True, False}
        (line,) = [record.getMessage() for record in caplog.records if "pinned" in record.getMessage()]
        assert "no more locked memory" in line and runtime.pinning_advice in line
        harness.device.close()
        assert not runtime.registered

    @pytest.mark.parametrize("direction", ["load", "save"])
    def test_wait_raises_the_error_of_any_call_and_the_device_stays_usable(
        self, harness: DeviceHarness, monkeypatch: MonkeyPatch, direction: str
    ) -> None:
        for call, kind in product(("wait_event", "allocate_pinned", "copy", "launch"), (torch.OutOfMemoryError, Panic)):
            with monkeypatch.context() as patch:
                patch.setattr(DeferredRuntime, call, partial(fail, kind("the accelerator is lost")))
                transfer = getattr(harness.device, direction)(harness.chunks(0, 160), harness.block_ids)
                for _ in range(2):
                    with pytest.raises(Exception, match="the accelerator is lost"):
                        transfer.wait()
                assert transfer.done()
        if direction == "load":
            harness.load(harness.chunks(0, 160))

    def test_an_error_of_the_work_itself_ends_the_transfer(
        self, harness: DeviceHarness, monkeypatch: MonkeyPatch
    ) -> None:
        """Accelerators report it when events are asked for, and ``done`` must not raise it to the engine."""
        transfer = harness.start_load(harness.chunks(0, 160))
        with monkeypatch.context() as patch:
            for call in ("query", "synchronize"):
                patch.setattr(DeferredRuntime, call, partial(fail, RuntimeError("an illegal memory access")))
            poll(transfer)
            with pytest.raises(RuntimeError, match="illegal memory access"):
                transfer.wait()
        harness.load(harness.chunks(0, 160))

    def test_attach_raises_unsupported_where_the_accelerator_refuses(
        self, harness: DeviceHarness, monkeypatch: MonkeyPatch
    ) -> None:
        """An engine then serves without reuse, and says why."""
        device, pages = self.create(DeferredRuntime()), (harness.layers, harness.setup.block_size, harness.layout)
        with monkeypatch.context() as patch:
            error = torch.OutOfMemoryError("0.1 of 80 GiB are free")
            patch.setattr(DeferredRuntime, "allocate", partial(fail, error))
            with pytest.raises(Unsupported, match=rf"{device.name}.* cannot be set up .*0\.1 of 80 GiB are free"):
                device.attach(*pages)
        device.attach(*pages)
        device.close()

    def test_a_failed_save_writes_nothing_later(self, harness: DeviceHarness, monkeypatch: MonkeyPatch) -> None:
        """After ``wait`` has raised, the slots may belong to another writer."""
        launch, n_launches = DeferredRuntime.launch, 0

        def count(*arguments: Any) -> None:
            nonlocal n_launches
            n_launches += 1
            launch(*arguments)

        def fail_the_last(*arguments: Any) -> None:
            nonlocal n_launches
            n_launches -= 1
            if not n_launches:
                raise RuntimeError("the accelerator is lost")
            launch(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(DeferredRuntime, "launch", count)
            harness.save(harness.chunks(0, 160))
            harness.overwrite_pages()
            patch.setattr(DeferredRuntime, "launch", fail_the_last)
            with pytest.raises(RuntimeError, match="lost"):
                harness.device.save(harness.chunks(0, 160), harness.block_ids).wait()
        harness.arena[:] = harness.expected_arena
        harness.save([harness.segment(200, 210, shard=7)])

    def test_a_transfer_without_wait_releases_its_arena(self, harness: DeviceHarness) -> None:
        harness.device.save(harness.chunks(0, 160), harness.block_ids)
        watched = weakref.ref(harness.arena)
        harness.device.close()
        harness.arena = np.empty(0, np.uint8)
        gc.collect()
        assert watched() is None


def fail(error: BaseException, *_: object) -> None:
    raise error


def save_pages_that_the_engine_has_yet_to_write(harness: DeviceHarness, runtime: DeferredRuntime) -> None:
    """Raises AssertionError if the save reads the pages before the engine's work that was submitted before it."""
    _overwrite_pages_later(harness, runtime)
    harness.start_save(harness.chunks(0, 160)).wait()
    harness.check()


def load_pages_that_the_engine_has_yet_to_write(
    harness: DeviceHarness, runtime: DeferredRuntime, then: Callable[[], None] = lambda: None
) -> None:
    """Raises AssertionError if the load writes the pages before the engine's work that was submitted before it.

    ``then`` is called between the two.
    """
    _overwrite_pages_later(harness, runtime)
    then()
    harness.start_load(harness.chunks(0, 160, source=50), 30).wait()
    runtime.synchronize(runtime.record_event())
    harness.check()


def wait_until_pinned(harness: DeviceHarness) -> None:
    assert isinstance(harness.device, StreamDevice)
    harness.device.wait_until_pinned()


def poll(transfer: Transfer) -> None:
    while not transfer.done():
        pass


def run_pending_transfers(harness: DeviceHarness) -> None:
    """Loads and saves of several chunks, pending at the same time."""
    chunks = harness.chunks(0, 240, source=100)
    transfers = [harness.start_load(chunks[:3], 10), harness.start_save([harness.segment(250, 290, shard=6)])]
    transfers += [harness.start_load(chunks[3:]), harness.start_save([harness.segment(290, 303, shard=7, row=9)])]
    for transfer in transfers[::-1]:
        transfer.wait()
    harness.check()


def _overwrite_pages_later(harness: DeviceHarness, runtime: DeferredRuntime) -> None:
    """Submit random writes of all pages to the engine's stream. The reference's pages change at once."""
    tensors = [tensor for layer in harness.layers for tensor in layer.tensors]
    before = [tensor.clone() for tensor in tensors]
    harness.overwrite_pages()
    after = [tensor.clone() for tensor in tensors]
    write = partial(_write, tensors)
    write(before)
    runtime.engine.submit(lambda: write(after))


def _write(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
