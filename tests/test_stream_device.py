"""What devices with streams share: pinning, errors, and bytes between staging, bounce buffers and the arena.

The device here copies in plain torch, on the deferred runtime. The suite of streams runs on those for accelerators.
"""

import threading
import time
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch", reason="pages are tensors: pip install torch")

import torch
from msgspec.structs import replace

from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.devices import HostArena, Runtime
from blendhub.testing.devices.deferred import DeferredRuntime
from blendhub.testing.devices.device_harness import DeviceHarness, DeviceSetup
from blendhub.testing.devices.streams import RUNTIMES, fail, wait_until_pinned
from harness.waiting import wait_until
from tests.copying_device import CopyingDevice, CopyingMover

DEADLINE_S = 20.0
SETUP = DeviceSetup(chunk_tokens=40, n_blocks=40, n_shards=8, rotations=(None,) * 3)


class SlowRegistration(DeferredRuntime):
    """A machine that takes long to lock memory: ``register`` waits until the test allows it."""

    def __init__(self):
        super().__init__()
        self._allowed = threading.Semaphore(0)
        self._calls = 0

    def register(self, memory):
        self._calls += 1
        assert self._allowed.acquire(timeout=DEADLINE_S), f"the test did not allow call {self._calls} of register"
        return super().register(memory)

    def allow(self, n_calls):
        """Let calls return, and wait until the call after them waits."""
        number = self._calls + n_calls
        self.allow_soon(n_calls)
        self.wait_for_call(number)

    def allow_soon(self, n_calls):
        self._allowed.release(n_calls)

    def wait_for_call(self, number=1):
        wait_until(lambda: self._calls >= number, DEADLINE_S, 0.001)


@pytest.fixture
def harness_on():
    """Makes devices on runtimes. When they are closed, nothing is registered, and no thread has failed."""
    made = []

    def make(runtime, **options):
        made.append((runtime, DeviceHarness(CopyingDevice(runtime, **options), "cpu", SETUP)))
        return made[-1][1]

    yield make
    for runtime, harness in made:
        harness.device.close()
        assert not runtime.registered and not runtime.errors


@pytest.fixture(params=RUNTIMES)
def harness(request, harness_on):
    harness = harness_on(RUNTIMES[request.param]())
    wait_until_pinned(harness)
    return harness


def copy_both_ways(harness, segments):
    harness.load(segments, 10)
    harness.overwrite_pages()
    harness.save(segments)


def test_transfers_do_not_wait_until_the_arena_is_pinned(harness_on):
    """Hosts with hundreds of GiB take minutes."""
    runtime = SlowRegistration()
    harness = harness_on(runtime)
    segments = [*harness.chunks(0, 240), harness.segment(250, 260, shard=7, row=9)]
    n_parts = -(-harness.arena.size // runtime.registration_bytes)
    runtime.wait_for_call()
    for n_next in (1, n_parts // 2, 1):
        copy_both_ways(harness, segments)
        runtime.allow(n_next)
    begin = time.perf_counter()
    harness.pin_new_arena()
    assert time.perf_counter() - begin < 0.05
    harness.load(segments, 10)
    runtime.allow_soon(1)  # the part of the first arena that is being registered
    threading.Timer(0.1, runtime.allow_soon, [1]).start()  # at most one of the new arena
    harness.device.close()


def test_what_was_pinned_before_an_error_is_used_and_the_log_says_what_helps(caplog, monkeypatch, harness_on):
    runtime, register = DeferredRuntime(), DeferredRuntime.register

    def fail_at_the_fourth(runtime, memory):
        return "no more locked memory" if len(runtime.registered) == 3 else register(runtime, memory)

    monkeypatch.setattr(DeferredRuntime, "register", fail_at_the_fourth)
    harness = harness_on(runtime)
    wait_until_pinned(harness)
    copy_both_ways(harness, harness.chunks(0, 240))
    assert len(runtime.registered) == 3 and harness.device._host_arena.is_pinned(2 * runtime.registration_bytes)
    (line,) = [record.getMessage() for record in caplog.records if "pinned" in record.getMessage()]
    assert "no more locked memory" in line and runtime.pinning_advice in line


@pytest.mark.parametrize("owner, call", [(DeferredRuntime, "allocate"), (CopyingMover, "__init__")])
def test_attach_raises_unsupported_where_the_accelerator_refuses(monkeypatch, harness_on, owner, call):
    """An engine then serves without reuse, and says why."""
    harness, device = harness_on(DeferredRuntime()), CopyingDevice(DeferredRuntime())
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, partial(fail, torch.OutOfMemoryError("0.1 of 80 GiB are free")))
        with pytest.raises(Unsupported, match=r"'torch' cannot be set up .*0\.1 of 80 GiB are free"):
            device.attach(harness.layers, harness.setup.block_size, harness.layout)
    harness.replace_device(device, harness.layers)
    harness.load(harness.chunks(0, 80))


def test_a_failed_save_writes_nothing_later(harness, monkeypatch):
    """After ``wait`` has raised, the slots may belong to another writer."""
    launch, n_launches, failing = DeferredRuntime.launch, 0, 0

    def launch_some(*arguments):
        nonlocal n_launches
        n_launches += 1
        if n_launches == failing:
            raise RuntimeError("the accelerator is lost")
        launch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DeferredRuntime, "launch", launch_some)
        harness.save(harness.chunks(0, 160))
        harness.overwrite_pages()
        failing = 2 * n_launches  # the last one of the same save
        with pytest.raises(RuntimeError, match="lost"):
            harness.device.save(harness.chunks(0, 160), harness.block_ids).wait()
    harness.arena[:] = harness.expected_arena
    harness.save([harness.segment(200, 210, shard=7)])


def test_movers_reach_only_what_is_pinned(monkeypatch, harness_on):
    """Parts of chunks whose shards are pinned, and aligned as kernels want, do not go through staging."""
    runtime, seen, parts_of = SlowRegistration(), [], CopyingMover.parts

    def note(mover, memory, batch):
        if not batch.slices:
            pinned = sum(map(len, runtime.registered))
            seen.append(batch.rows.at + shard_bytes <= pinned and batch.rows.at % 16 == 0)
        return parts_of(mover, memory, batch)

    monkeypatch.setattr(CopyingMover, "parts", note)
    harness = harness_on(runtime)
    shard_bytes = harness.layout.shard_bytes
    parts = [replace(harness.segment(7 + 40 * n, 30 + 40 * n, row=n), shard=n * shard_bytes) for n in range(3)]
    parts.append(replace(harness.segment(170, 180), shard=3 * shard_bytes + 4))
    runtime.wait_for_call()
    for n_next in (3, 3, 6, 1):
        copy_both_ways(harness, parts)
        runtime.allow(n_next)
    assert seen and all(seen)
    runtime.allow_soon(1)


def test_staging_mib_bounds_device_memory_and_its_error_names_a_sufficient_value(monkeypatch, harness_on):
    allocate, allocated = DeferredRuntime.allocate, []
    monkeypatch.setattr(DeferredRuntime, "allocate", lambda *given: (allocated.append(given[1]), allocate(*given))[1])
    harness_on(DeferredRuntime(), staging_mib=2.5)
    assert 2 * 2**20 < sum(allocated) <= 2.5 * 2**20
    with pytest.raises(InvalidInput, match=r"staging_mib = 0\.01 is too little.*set it to") as raised:
        harness_on(DeferredRuntime(), staging_mib=0.01)
    enough = float(str(raised.value).split("set it to ")[1].split()[0])
    harness = harness_on(DeferredRuntime(), staging_mib=enough)
    harness.load(harness.chunks(0, 80))


def test_pinning_holds_up_no_call_for_more_than_5_ms_and_is_no_fraction_of_the_time(monkeypatch):
    """A call of the accelerator waits for at most one part."""
    calls = []

    def register(runtime, memory):
        """At the slowest recorded rate, half a second a GiB."""
        begin = time.monotonic()
        time.sleep(memory.size / 2**31)
        calls.append((memory.size, begin, time.monotonic()))

    monkeypatch.setattr(DeferredRuntime, "register", register)
    monkeypatch.setattr(DeferredRuntime, "registration_bytes", Runtime.registration_bytes)
    HostArena(np.zeros(2**26, np.uint8), DeferredRuntime()).pin()
    sizes, begins, ends = zip(*calls, strict=True)
    assert sum(sizes) == 2**26 and max(sizes) / 2**31 <= 0.005
    for took, pause in zip(np.subtract(ends, begins), np.subtract(begins[1:], ends[:-1]), strict=False):
        assert pause >= 0.9 * took
    assert ends[-1] - begins[0] < 5 * sum(np.subtract(ends, begins))
