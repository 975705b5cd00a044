"""Pending transfers, replaced arenas, and close."""

import gc
import mmap
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import torch
from msgspec.structs import replace

from blendhub.contracts import ArenaProgress, Device
from blendhub.testing.devices.base import DeviceTests, MakeHarness
from blendhub.testing.devices.device_harness import DeviceHarness, Rotary, occupy_engine
from blendhub.testing.sentences import holds

PIN_S = 1.0
"""The most time that ``pin`` may take, however slowly the hub reserves the arena."""
LOOK_S = 0.25
"""The time in which a device that looks for more reserved memory has looked."""


@holds("The engine's work that is submitted after ``wait`` returned sees the transfer.")
class LifecycleTests(DeviceTests):
    def _large(self, make_harness: MakeHarness) -> DeviceHarness:
        """A harness whose transfers take long enough to be still pending after the call."""
        sizes = {"block_size": 16, "chunk_tokens": 128, "n_blocks": 80, "n_shards": 10}
        widths = {"kv_heads": 4, "key_dim": 32, "value_dim": 32}
        return make_harness(self.setup(**sizes, **widths, rotations=(Rotary(width=32, positions=4096),)))

    @holds("Several transfers may be pending.")
    def test_several_transfers_may_be_pending(self, make_harness: MakeHarness) -> None:
        """Polling alone ends them, and waiting changes nothing more."""
        harness = self._large(make_harness)
        chunks = harness.chunks(0, 1024, source=2000)
        transfers = [
            harness.start_load(chunks[:2]),
            harness.start_load(chunks[2:5], 300),
            harness.start_save([harness.segment(700, 800, shard=8), harness.segment(800, 828, shard=9)]),
            harness.start_load(chunks[7:]),
        ]
        while not all(transfer.done() for transfer in transfers):
            pass
        harness.check()
        for transfer in [*reversed(transfers), *transfers]:
            transfer.wait()

    def test_an_empty_transfer_ends(self, harness: DeviceHarness) -> None:
        loads = harness.start_load([]), harness.start_load([harness.segment(3, 9)], 9)
        for transfer in (*loads, harness.start_save([]), harness.start_save([harness.segment(3, 3)])):
            transfer.wait()
            assert transfer.done()
        harness.check()

    @holds("A save reads the pages after all work that the engine submitted before the call")
    def test_transfers_follow_the_engine_s_earlier_work(self, make_harness: MakeHarness) -> None:
        """On an accelerator, the engine's writes wait in its stream while the transfer starts."""
        harness = self._large(make_harness)
        for _ in range(2):
            harness.overwrite_pages(after=partial(occupy_engine, self.torch_type))
            harness.save(harness.chunks(0, 1024))
            harness.overwrite_pages(after=partial(occupy_engine, self.torch_type))
            harness.device.begin_step()
            harness.load(harness.chunks(0, 512), skip_prefix_n_tokens=30)

    @holds("The engine begins a step, whose work")
    def test_a_step_writes_other_pages_than_its_loads_and_its_saves_see_them(self, make_harness: MakeHarness) -> None:
        harness = self._large(make_harness)
        harness.block_ids = np.arange(harness.setup.n_blocks)
        first_token = 512
        harness.device.begin_step()
        for _ in range(2):
            of_the_step = slice(first_token // harness.setup.block_size, None)
            harness.overwrite_pages(of_the_step, after=partial(occupy_engine, self.torch_type))
            transfers = [
                harness.start_load(harness.chunks(0, first_token, source=2000)),
                harness.start_save([harness.segment(first_token, first_token + 100, shard=8)]),
            ]
            for transfer in transfers:
                transfer.wait()
            harness.check()

    @holds("Any thread may make any call, inside torch's inference mode or outside of it.")
    def test_calls_inside_and_outside_of_inference_mode(self, make_harness: MakeHarness) -> None:
        """An engine's step runs inside of it, and threads that save do not: tensors must serve both."""

        def called(inside: bool, method: Callable[..., object], *arguments: object) -> None:
            def in_mode() -> None:
                with torch.inference_mode(inside):
                    method(*arguments)

            with ThreadPoolExecutor(1) as another_thread:
                another_thread.submit(in_mode).result()

        for attaching, pinning, copying in product((False, True), repeat=3):
            harness = make_harness(self.setup(rotations=(Rotary(), None)))
            device = self.create()
            called(attaching, harness.replace_device, device, harness.layers)
            called(pinning, harness.pin_new_arena)
            called(copying, harness.load, harness.chunks(3, 60, source=100), 7)
            called(copying, harness.save, harness.chunks(3, 60))
            called(attaching, device.close)

    @holds("Replaces an earlier arena.")
    def test_another_arena_replaces_the_first(self, harness: DeviceHarness) -> None:
        """It may be smaller or larger: segments are checked against the arena that was pinned last."""
        for n_shards, segment in ((1, harness.segment(0, 20)), (9, harness.segment(0, 20, shard=8))):
            harness.load([harness.segment(0, 20)])
            first, before = harness.arena, harness.arena.copy()
            harness.setup = replace(harness.setup, n_shards=n_shards)
            harness.pin_new_arena()
            harness.load([segment])
            harness.overwrite_pages()
            harness.save([segment])
            assert np.array_equal(first, before)

    @holds("what lies behind that is not pinned yet")
    def test_an_arena_is_used_while_it_is_being_reserved(self, harness: DeviceHarness) -> None:
        """Behind the reserved part, a touch makes pages for which memory may be missing."""
        expected, goal = harness.expected_arena, harness.shard(3)
        progress, asked = ArenaProgress(0, goal), 0

        def ask() -> ArenaProgress:
            nonlocal asked
            asked += 1
            return progress

        with open(os.memfd_create("arena"), "r+b") as file:
            file.truncate(len(expected))
            arena = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
            begin = time.monotonic()
            harness.device.pin(arena, ask)
            assert time.monotonic() - begin < PIN_S, "pin waits until the arena is reserved"
            for n_shards in (1, 2, 3):
                end = harness.shard(n_shards)
                harness.arena, harness.expected_arena = arena[:end], expected[:end]
                harness.arena[:] = harness.expected_arena
                progress = ArenaProgress(end, goal)
                harness.load(harness.chunks(0, n_shards * harness.layout.chunk_tokens), 5)
                harness.overwrite_pages()
                harness.save(harness.chunks(0, n_shards * harness.layout.chunk_tokens))
                time.sleep(LOOK_S)
                touched = os.fstat(file.fileno()).st_blocks * 512
                assert touched <= -(-end // mmap.PAGESIZE) * mmap.PAGESIZE, "memory that is not reserved was touched"
            deadline, before = time.monotonic() + 20 * LOOK_S, -1
            while asked != before:
                assert time.monotonic() < deadline, "nothing is left, but the device still asks for more"
                before = asked
                time.sleep(LOOK_S)

    @holds("Wait for pending transfers, and release arena and pages.")
    def test_close_waits_for_pending_transfers(self, make_harness: MakeHarness) -> None:
        """It may be called twice."""
        harness = self._large(make_harness)
        chunks = harness.chunks(0, 1024)
        harness.reference.load(chunks, harness.block_ids)
        transfers = [harness.device.load(chunks, harness.block_ids) for _ in range(4)]
        harness.device.close()
        harness.device.close()
        assert all(transfer.done() for transfer in transfers)
        harness.check()
        for transfer in transfers:
            transfer.wait()

    @holds("Wait for pending transfers, and release arena and pages.")
    def test_close_releases_arena_and_pages(self, harness: DeviceHarness) -> None:
        memory = mmap.mmap(-1, harness.arena.size)
        harness.arena = np.frombuffer(memory, np.uint8)
        harness.arena[:] = harness.expected_arena
        harness.device.pin(harness.arena)
        harness.load(harness.chunks(3, 60))
        harness.save(harness.chunks(3, 60))
        tensors = [weakref.ref(tensor) for layer in harness.layers for tensor in layer.tensors]
        harness.device.close()
        harness.layers.clear()
        harness.arena = np.empty(0, np.uint8)
        gc.collect()
        assert [tensor() for tensor in tensors] == [None] * len(tensors)
        memory.close()  # raises BufferError while a view of it exists

    @holds("The number of neighbouring tokens that the engine's own attention computes")
    def test_block_tokens_is_a_number_of_tokens(self, device: Device) -> None:
        assert isinstance(device.block_tokens, int)
        assert device.block_tokens >= 1
