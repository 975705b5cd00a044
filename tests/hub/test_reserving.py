"""An arena is reserved while the hub serves: slots exist as far as it is, and where memory ends, the arena does."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blendhub.client.arena_view import SHM
from blendhub.core.errors import ArenaFull
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub
from blendhub.hub.memory import arena as arena_module
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.segments import Mount
from blendhub.system import memory
from harness.namespaces import skip_unless_permitted
from tests.hub.hub_direct import LAYOUT, namespace, tokens
from tests.hub.processes import IN_A_PLACE, check, run_python, store, until

GIB = 2**30
RESERVED_A_SECOND = 1.3 * GIB
"""What a machine with 64 GiB of free memory was seen to reserve."""


@pytest.fixture
def slow(monkeypatch):
    """Reserving takes the recorded time, and no memory."""
    monkeypatch.setattr(Arena, "_allocate", lambda self, at, size: at and time.sleep(size / RESERVED_A_SECOND))
    monkeypatch.setattr(arena_module, "mount_at", lambda place: Mount("tmpfs", ()))
    monkeypatch.setattr(arena_module, "available_bytes", lambda: 2**50)
    monkeypatch.setattr(arena_module, "free_shared_bytes", lambda: 2**50)


@pytest.mark.alone
def test_a_hub_starts_as_soon_with_512_gib_as_with_1_and_stores_meanwhile(slow):
    before, seconds = set(SHM.iterdir()), {}
    for gib in (1, 512):
        started = time.monotonic()
        with embedded_hub(HubConfig(arena_gib=gib, metrics="")) as hub, hub.connect() as client:
            client.register("e", namespace(), rank=0)
            store(client, tokens(1, 96))
            assert check(client, tokens(1, 96)) == 96
            gauges = client.stats().gauges
            seconds[gib] = time.monotonic() - started
            assert gauges["arena_bytes"] == gib * GIB >= gauges["arena_reserved_bytes"] > gauges["arena_free_bytes"] > 0
            if gib > 1:
                early = client.arena.progress()
                until(lambda: client.arena.progress().reserved > early.reserved)  # noqa: B023
                assert client.arena.progress().left
            started = time.monotonic()
        assert time.monotonic() - started < 5.0, "the end of the hub waits for the reservation"
    assert seconds[512] < seconds[1] + 1.0
    assert set(SHM.iterdir()) == before


def test_slots_exist_as_far_as_memory_is_reserved(monkeypatch, make_hub):
    """The first step comes with the arena, and the others while it is used."""
    monkeypatch.setattr(arena_module, "STEP", 2**14)
    hub = make_hub(64)
    member = hub.join()
    view, early = member.view, member.view.progress()
    size = namespace().slot_bytes
    assert early.goal == 64 * size == len(view.bytes) and early.reserved == 2**14 - 4096
    prompt = tokens(1, 64 * 32)
    few = hub.arena.extents.size // size
    assert len(member.reserve(prompt, Span(0, len(prompt))).slots) == few
    with pytest.raises(ArenaFull, match="MiB when all is reserved"):
        member.reserve(tokens(2, 320), Span(0, 320))
    hub.run(hub.arena.reserve())
    assert view.progress() == (64 * size, 64 * size)
    rest = member.reserve(tokens(2, 64 * 32), Span(0, 64 * 32))
    assert len(rest.slots) == 64 - few
    last = max(slot.slot for slot in rest.slots)
    view.slot(last, size)[:] = 7
    assert bytes(hub.arena.slot(last, size)) == bytes([7]) * size, "who mapped early writes what was reserved late"
    hub.state.check_integrity()


OUT_OF_MEMORY = """
import asyncio, logging, os, sys
import numpy as np
from blendhub.client.arena_view import ArenaView
from blendhub.hub.memory import arena as module

logging.basicConfig(stream=sys.stdout, format="%(message)s")
module.STEP = 2**20
arena = module.Arena(48 * 2**20)
view = ArenaView(arena.name)
with open("/dev/shm/other", "wb") as other:
    os.posix_fallocate(other.fileno(), 0, 40 * 2**20)
asyncio.run(arena.reserve())
slots = view.slot(0, view.progress().reserved)
slots[:] = 1  # ends in SIGBUS where no memory is reserved
print(int(slots.sum()), *view.progress(), arena.describe(), sep=";")
room = os.statvfs("/dev/shm")
print(room.f_bavail * room.f_frsize)
arena.close()
"""


@pytest.mark.parametrize("options", ["size=64m", "size=64m,huge=advise"])
def test_an_arena_whose_memory_ends_half_way_is_what_was_reserved(options):
    within = [*IN_A_PLACE, options]
    skip_unless_permitted(within)
    warning, found, left = run_python(OUT_OF_MEMORY, within=within).communicate(timeout=60)[0].splitlines()
    written, reserved, goal, described = found.split(";")
    assert 20 * 2**20 < int(written) == int(reserved) == int(goal) < 24 * 2**20
    assert described.endswith(" MiB of the 48 MiB that it was to have") and int(left) < 2**22
    assert "no more memory could be reserved" in warning and "set arena_gib to 0.02" in warning


def test_a_step_that_would_leave_hardly_any_memory_ends_the_arena_and_not_the_hub(monkeypatch, caplog):
    """The kernel kills a process that reserves more than its control group may have, instead of refusing it."""
    left = iter([2**30, 2**29, arena_module.SPARE_BYTES])
    monkeypatch.setattr(arena_module, "STEP", 2**16)
    monkeypatch.setattr(arena_module, "available_bytes", lambda: next(left))
    arena = Arena(2**20)
    asyncio.run(arena.reserve())
    assert arena.progress == (3 * 2**16 - 4096, 3 * 2**16 - 4096)
    assert "hardly any memory left" in caplog.text
    arena.close()


def test_pages_lie_on_all_nodes_in_turn_from_the_first_on(monkeypatch, caplog):
    """The kernel asks for the policy when it makes a page. A container that may set none has an arena all the same."""
    calls, allocate = list[Any](), Arena._allocate

    def note_allocate(self, at, size):
        calls.append("pages")
        allocate(self, at, size)

    def refuse(address, size, nodes):
        calls.append((size, nodes))
        raise PermissionError("mbind: Operation not permitted")

    monkeypatch.setattr(Arena, "_allocate", note_allocate)
    monkeypatch.setattr(arena_module, "mount_at", lambda place: Mount("tmpfs", ()))
    monkeypatch.setattr(arena_module, "interleave", refuse)
    for nodes in ([], [0], [0, 2, 65]):
        monkeypatch.setattr(arena_module, "memory_nodes", lambda nodes=nodes: nodes)
        arena = Arena(2**20)
        assert arena.progress.left == 0
        arena.close()
    assert calls == ["pages", "pages", (2**20 + 4096, [0, 2, 65]), "pages"]
    assert "--cap-add SYS_NICE" in caplog.text


def test_the_kernel_takes_the_policy():
    if not memory.memory_nodes():
        pytest.skip("this kernel knows no NUMA nodes")
    arena = Arena(2**20)
    try:
        memory.interleave(arena._address, 2**20, memory.memory_nodes())
    except PermissionError as error:
        pytest.skip(f"this container may not set policies: {error}")
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    assert any(" interleave:" in line for line in lines if arena.name.segment in line)
    arena.close()


@pytest.mark.parametrize(
    "present, allowed, nodes",
    [("0\n", "0", [0]), ("0-1,4\n", "0-7", [0, 1, 4]), ("0-3\n", "1-2", [1, 2]), (None, "0", [])],
)
def test_the_nodes_are_those_with_memory_that_this_process_may_use(tmp_path, present, allowed, nodes):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t{allowed}\n")
    if present:
        (tmp_path / "sys/devices/system/node").mkdir(parents=True)
        (tmp_path / "sys/devices/system/node/has_memory").write_text(present)
    assert memory.memory_nodes(tmp_path) == nodes


def test_the_shared_memory_of_a_container_that_fits_no_chunk_is_named_with_the_flag(make_hub):
    hub = make_hub(1)
    large = msgspec.structs.replace(LAYOUT, layers=LAYOUT.layers * 2)
    with pytest.raises(
        ArenaFull, match=r"not one chunk of this model fits: .*--shm-size=16g.*an emptyDir volume with medium"
    ):
        hub.join(namespace=namespace(layout=large)).reserve(tokens(1, 32))
