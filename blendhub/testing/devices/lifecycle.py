"""Transfers under way, arenas that are replaced, and the end."""

import gc
import mmap
import weakref
from typing import Any

import msgspec
import numpy as np

from blendhub.contracts import Device
from blendhub.testing.devices.base import DeviceTests, MakeWorld
from blendhub.testing.devices.world import Turning, World


class LifecycleTests(DeviceTests):
    def _large(self, make_world: MakeWorld) -> World:
        """A world in which a transfer takes a while."""
        return make_world(
            self.setup(
                block_size=16,
                chunk_tokens=128,
                n_blocks=80,
                n_shards=10,
                kv_heads=4,
                key_dim=32,
                value_dim=32,
                turnings=(Turning(width=32, positions=4096),),
            )
        )

    def test_several_transfers_are_under_way(self, make_world: MakeWorld) -> None:
        world = self._large(make_world)
        chunks = world.chunks(0, 1024, source=2000)
        transfers = [
            world.start_load(chunks[:2]),
            world.start_load(chunks[2:5], 300),
            world.start_save([world.segment(700, 800, shard=8), world.segment(800, 828, shard=9)]),
            world.start_load(chunks[7:]),
        ]
        for transfer in reversed(transfers):
            transfer.wait()
            assert transfer.done()
        world.check()

    def test_waiting_again_returns(self, world: World) -> None:
        transfer = world.start_load(world.chunks(3, 60))
        transfer.wait()
        transfer.wait()
        assert transfer.done()

    def test_polling_ends_without_waiting(self, make_world: MakeWorld) -> None:
        world = self._large(make_world)
        transfer = world.start_load(world.chunks(0, 1024))
        while not transfer.done():
            pass
        world.check()
        transfer.wait()

    def test_an_empty_transfer_ends(self, world: World) -> None:
        for transfer in (
            world.start_load([]),
            world.start_load([world.segment(3, 9)], 9),
            world.start_save([]),
            world.start_save([world.segment(3, 3)]),
        ):
            transfer.wait()
            assert transfer.done()
        world.check()

    def test_a_save_sees_what_was_written_before_the_call(self, make_world: MakeWorld) -> None:
        world = self._large(make_world)
        for _ in range(3):
            world.overwrite_pages()
            world.save(world.chunks(0, 1024))

    def test_a_load_sees_what_is_in_the_arena(self, world: World) -> None:
        for value in (1, 2):
            world.arena[:] = world.expected_arena[:] = value
            world.load(world.chunks(3, 60))

    def test_another_arena_replaces_the_first(self, world: World) -> None:
        world.load(world.chunks(3, 60))
        first, before = world.arena, world.arena.copy()
        world.pin_another()
        world.load(world.chunks(3, 60))
        world.overwrite_pages()
        world.save(world.chunks(3, 60))
        assert np.array_equal(first, before)

    def test_another_arena_may_be_smaller_or_larger(self, world: World) -> None:
        """What leaves the arena is measured by the newer one."""
        world.setup = msgspec.structs.replace(world.setup, n_shards=1)
        world.pin_another()
        world.load([world.segment(0, 20)])
        world.setup = msgspec.structs.replace(world.setup, n_shards=9)
        world.pin_another()
        world.load([world.segment(0, 20, shard=8)])

    def test_an_arena_of_shared_memory(self, world: World) -> None:
        memory = mmap.mmap(-1, world.arena.size)
        world.arena = np.frombuffer(memory, np.uint8)
        world.arena[:] = world.expected_arena
        world.device.pin(world.arena)
        world.load(world.chunks(3, 60))
        world.overwrite_pages()
        world.save(world.chunks(3, 60))
        world.device.close()
        world.arena = np.empty(0, np.uint8)
        gc.collect()
        memory.close()  # raises if anybody still looks at it

    def test_closing_waits_for_what_is_under_way(self, make_world: MakeWorld) -> None:
        world = self._large(make_world)
        chunks = world.chunks(0, 1024)
        world.reference.load(chunks, world.block_ids)
        transfers = [world.device.load(chunks, world.block_ids) for _ in range(10)]
        world.device.close()
        assert all(transfer.done() for transfer in transfers)
        world.check()
        for transfer in transfers:
            transfer.wait()

    def test_closing_lets_go_of_arena_and_pages(self, world: World) -> None:
        world.load(world.chunks(3, 60))
        device, held = world.device, [world.arena, *(tensor for layer in world.layers for tensor in layer.tensors)]
        watched = [weakref.ref(thing) for thing in held]
        device.close()
        held.clear()
        world.layers.clear()
        world.arena = np.empty(0, np.uint8)
        gc.collect()
        assert [watch() for watch in watched] == [None] * len(watched)

    def test_closing_twice(self, world: World, device: Device) -> None:
        world.device.close()
        world.device.close()
        device.close()
        device.close()

    def test_block_tokens_is_a_number_of_tokens(self, device: Device) -> None:
        assert isinstance(device.block_tokens, int)
        assert device.block_tokens >= 1

    def test_a_person_can_be_told_how_it_works(self, world: World, device: Device) -> None:
        for told in (world.device.describe(), device.describe()):
            facts: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(told))
            assert facts == told
