"""The conformance suite of devices with streams: missing synchronisation shows every time. Needs torch."""

import gc
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import pytest
import torch

from blendhub.contracts import Device, PageFormat, Transfer
from blendhub.devices import StreamDevice
from blendhub.testing.devices.base import harnesses
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup, Rotary
from blendhub.testing.sentences import holds

__all__ = ["DeferredRuntime", "StreamSuite"]

Direction: TypeAlias = Literal["load", "save"]
DIRECTIONS = get_args(Direction)

RUNTIMES: Mapping[str, Callable[[], DeferredRuntime]] = {
    "pinned arena": DeferredRuntime,
    "arena that cannot be pinned": lambda: DeferredRuntime("no more locked memory"),
    "arena that kernels do not reach": lambda: DeferredRuntime(host_pointers=False),
}


class Panic(BaseException):
    """An error of the kind that extension modules in Rust raise."""


@holds("A save reads the pages after all work that the engine submitted before the call")
class StreamSuite(ABC):
    """Subclass it with a ``create`` that makes a device whose work all goes through the given runtime.

    A device that stages KV should be tested with staging that is smaller than one chunk, so that transfers reuse it.
    """

    contract: ClassVar[type] = Device

    formats: ClassVar[tuple[PageFormat, ...]] = Device.formats
    """The page formats that the device supports; the first is used."""

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

    def test_transfers_follow_the_engine_s_earlier_work_alone(
        self, harness: DeviceHarness, runtime: DeferredRuntime
    ) -> None:
        for direction in DIRECTIONS:
            check_that_it_follows_the_engine(harness, runtime, direction)
        transfer = harness.start_save(harness.chunks(0, 160))
        later = runtime.engine.submit(lambda: None)
        transfer.wait()
        harness.check()
        assert not later.done

    @holds("A load reads and writes them after all work that the engine submitted before the last")
    def test_in_a_step_saves_follow_its_work_and_loads_only_that_before(
        self, harness: DeviceHarness, runtime: DeferredRuntime
    ) -> None:
        harness.device.begin_step()
        forward = runtime.engine.submit(lambda: None)
        harness.start_load([*harness.chunks(0, 160, source=50), harness.copied(160, 200, row=3)], 30).wait()
        harness.check()
        assert not forward.done
        check_that_it_follows_the_engine(harness, runtime, "load", then=harness.device.begin_step)
        check_that_it_follows_the_engine(harness, runtime, "save")

    @holds("Let the engine use the pages for something else:")
    def test_the_engine_s_stream_waits_for_reads_of_pages_and_its_thread_does_not(
        self, harness: DeviceHarness, runtime: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither the engine's later work, nor loads that follow it, write pages before a save has read them."""
        saves = [harness.start_save(harness.chunks(0, 160)), harness.start_save([harness.segment(160, 190, shard=6)])]
        synchronize, this_thread = runtime.synchronize, threading.get_ident()

        def synchronize_elsewhere(event: Any) -> None:
            assert threading.get_ident() != this_thread, "the engine's thread waits for a save"
            synchronize(event)

        with monkeypatch.context() as patch:
            patch.setattr(runtime, "synchronize", synchronize_elsewhere)
            for save in saves:
                save.release_pages()
        harness.device.begin_step()
        load = harness.start_load([harness.segment(at, at + 40, shard=4 + at // 40) for at in (0, 40)])
        overwrite_later(harness, runtime)
        load.wait()
        runtime.synchronize(runtime.record_event())
        for save in saves:
            save.wait()
        harness.check()

    @holds("Let the engine use the pages for something else:")
    def test_blocks_that_a_load_has_read_may_change(self, harness: DeviceHarness, runtime: DeferredRuntime) -> None:
        """The engine gives them to another request once it has seen that they are released."""
        harness.block_ids, harness.donors = np.arange(30), np.arange(30, 40)
        load = harness.start_load([harness.copied(5, 160, row=9, source=70), *harness.chunks(160, 240)])
        load.release_pages()
        overwrite_later(harness, runtime, slice(30, 40))
        runtime.synchronize(runtime.record_event())
        load.wait()
        harness.check()

    @holds("Any thread may make any call, inside torch's inference mode or outside of it.")
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

    @holds("Several transfers may be pending.")
    def test_pending_transfers_do_not_overwrite_each_other_s_staging(self, harness: DeviceHarness) -> None:
        chunks = harness.chunks(0, 240, source=100)
        transfers = [harness.start_load(chunks[:3], 10), harness.start_save([harness.segment(250, 290, shard=6)])]
        transfers += [harness.start_load(chunks[3:]), harness.start_save([harness.segment(290, 303, shard=7, row=9)])]
        for transfer in transfers[::-1]:
            transfer.wait()
        harness.check()

    @holds("Replaces an earlier arena.")
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
        released = weakref.ref(first)
        del first
        gc.collect()
        assert released() is None, "a transfer that nothing waited for keeps its arena"

    @holds("If the copy failed, every call raises an ``Exception``, of any class.")
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_wait_raises_the_error_of_any_call_and_the_device_stays_usable(
        self, harness: DeviceHarness, monkeypatch: pytest.MonkeyPatch, direction: str
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


def fail(error: BaseException, *_: object) -> None:
    raise error


def check_that_it_follows_the_engine(
    harness: DeviceHarness, runtime: DeferredRuntime, direction: Direction, then: Callable[[], None] = lambda: None
) -> None:
    """Raises AssertionError if a transfer reads or writes the pages before the engine's work that was submitted before.

    That work overwrites all pages; ``then`` is called between it and the transfer.
    """
    overwrite_later(harness, runtime)
    then()
    if direction == "save":
        harness.start_save(harness.chunks(0, 160)).wait()
    else:
        harness.start_load([*harness.chunks(0, 160, source=50), harness.copied(160, 200, row=3)], 30).wait()
    runtime.synchronize(runtime.record_event())
    harness.check()


def overwrite_later(harness: DeviceHarness, runtime: DeferredRuntime, blocks: slice = slice(None)) -> None:
    """Submit work to the engine's stream that overwrites these pages."""
    tensors = [tensor[blocks] for layer in harness.layers for tensor in layer.tensors]

    def write(values: list[torch.Tensor]) -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)

    with runtime.paused():  # a device's thread may go on with a load
        before = [tensor.clone() for tensor in tensors]
        harness.overwrite_pages(blocks)
        after = [tensor.clone() for tensor in tensors]
        write(before)
    runtime.engine.submit(partial(write, after))


def wait_until_pinned(harness: DeviceHarness) -> None:
    assert isinstance(harness.device, StreamDevice)
    harness.device.wait_until_pinned()


def poll(transfer: Transfer) -> None:
    while not transfer.done():
        pass
