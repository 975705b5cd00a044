"""Shared memory: mapped by name, always removed, and reserved while the hub serves, as far as there is memory."""

import asyncio
import logging
import os
import signal
import threading
import time

import msgspec
import numpy as np
import pytest

from blendhub.client.arena_view import SHM, ArenaName, ArenaView, header_of
from blendhub.core.errors import ArenaFull, HubError, InvalidInput
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub
from blendhub.hub.memory import arena as arena_module
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.segments import Mount, remove_leftovers
from tests.hub.hub_direct import LAYOUT, namespace, tokens
from tests.hub.processes import IN_A_CONTAINER, IN_A_PLACE, check, python_of, run_python, store, until
from tests.namespaces import skip_unless_permitted

GIB = 2**30


def test_what_one_side_writes_the_other_reads_and_its_mapping_is_seen_until_the_last_array_is_gone():
    arena = Arena(1 << 16)
    view = ArenaView(arena.name)
    view.slot(100, 5)[:] = np.frombuffer(b"bytes", np.uint8)
    assert bytes(arena.slot(100, 5)) == b"bytes"
    assert os.stat(SHM / arena.name.segment).st_mode & 0o777 == 0o600
    with pytest.raises(InvalidInput, match="not inside"):
        view.slot(1 << 16, 1)
    mapping, part = view.mapping, view.slot(100, 5)
    del view
    assert arena.is_mapped_by(mapping) and not arena.is_mapped_by(mapping + 1)
    removed = ArenaView(arena.name)
    del part
    assert not arena.is_mapped_by(mapping)
    arena.close()
    assert not (SHM / arena.name.segment).exists()
    assert bytes(removed.slot(100, 5)) == b"bytes", "who maps it keeps it"


def test_another_arena_of_the_same_name_is_not_mapped():
    arena = Arena(1 << 12)
    path, larger = SHM / arena.name.segment, ArenaName(arena.name.segment, arena.name.nonce, 1 << 30)
    for name, content, why in (
        (ArenaName(arena.name.segment, "other nonce", 1 << 12), None, r"another hub's arena.*docker run --ipc=host"),
        (ArenaName("blendhub-nowhere", arena.name.nonce, 1 << 12), None, "No such file or directory"),
        (larger, header_of(larger) + bytes(5000), "cannot map the hub's arena"),
        (larger, b"something else", "does not begin as an arena"),
    ):
        if content:
            path.write_bytes(content)
        with pytest.raises(HubError, match=why):
            ArenaView(name)
    arena.close()


HOLD = """
import time
from blendhub.hub.memory.arena import Arena
arena = Arena(1 << 20)
print(arena.name.segment, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("within", [(), IN_A_CONTAINER], ids=["beside it", "in a container"])
def test_what_a_killed_hub_left_is_removed_and_what_a_live_one_has_is_not(within):
    skip_unless_permitted(within)
    holders = [run_python(HOLD, within=within) for _ in range(2)]
    dead, alive = (holder.stdout.readline().strip() for holder in holders)
    os.kill(python_of(holders[0]), signal.SIGKILL)
    holders[0].wait()
    assert dead in remove_leftovers()
    assert not (SHM / dead).exists() and (SHM / alive).exists()
    holders[1].kill()
    holders[1].wait()
    until(lambda: alive in remove_leftovers())


@pytest.mark.timeout(20)
def test_what_is_only_named_like_an_arena_stops_no_hub(tmp_path, caplog):
    path = SHM / f"blendhub-{os.getuid()}-{'0' * 16}"
    (tmp_path / "precious").write_text("precious")
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "precious")):
        make(path)
        with caplog.at_level(logging.WARNING):
            Arena(1 << 16).close()
        assert f"skipped {path}" in caplog.text and os.path.lexists(path)
        path.unlink()


# Reserved step by step.


@pytest.mark.alone
def test_a_hub_with_512_gib_serves_and_ends_at_once(monkeypatch):
    """Reserving takes as long as a machine with 64 GiB of free memory was seen to need, and no memory."""
    monkeypatch.setattr(Arena, "_allocate", lambda self, at, size: at and time.sleep(size / (1.3 * GIB)))
    monkeypatch.setattr(arena_module, "mount_at", lambda place: Mount("tmpfs", ()))
    for free in ("available_bytes", "free_shared_bytes"):
        monkeypatch.setattr(arena_module, free, lambda: 2**50)
    before, started = set(SHM.iterdir()), time.monotonic()
    with embedded_hub(HubConfig(arena_gib=512, metrics="")) as hub, hub.connect() as client:
        client.register("e", namespace(), rank=0)
        store(client, tokens(1, 96))
        assert check(client, tokens(1, 96)) == 96
        assert time.monotonic() - started < 10.0
        gauges, early = client.stats().result().gauges, client.arena.progress()
        assert gauges["arena_bytes"] == 512 * GIB > gauges["arena_reserved_bytes"] > gauges["arena_free_bytes"] > 0
        until(lambda: early.reserved < client.arena.progress().reserved < 512 * GIB)
        ending = time.monotonic()
    assert time.monotonic() - ending < 5.0, "the end of the hub waits for the reservation"
    assert set(SHM.iterdir()) == before


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
lines = open("/proc/meminfo").read().splitlines()
(huge_kib,) = (int(line.split()[1]) for line in lines if line.startswith("ShmemHugePages"))
slots = view.slot(0, view.progress().reserved)
slots[:] = 1  # ends in SIGBUS where no memory is reserved
print(int(slots.sum()), *view.progress(), arena.describe(), huge_kib, sep=";")
room = os.statvfs("/dev/shm")
print(room.f_bavail * room.f_frsize)
arena.close()
"""


@pytest.mark.alone
@pytest.mark.parametrize("options", ["size=64m", "size=64m,huge=advise"])
def test_an_arena_whose_memory_ends_half_way_is_what_was_reserved(options):
    within = [*IN_A_PLACE, options]
    skip_unless_permitted(within)
    warning, found, left = run_python(OUT_OF_MEMORY, within=within).communicate(timeout=60)[0].splitlines()
    written, reserved, goal, described, huge_kib = found.split(";")
    assert int(huge_kib) >= 2**14 or "huge" not in options, "the advice comes before the memory is reserved"
    assert 20 * 2**20 < int(written) == int(reserved) == int(goal) < 24 * 2**20
    assert described.endswith(" MiB of the 48 MiB that it was to have") and int(left) < 2**22
    assert "no more memory could be reserved" in warning and "set arena_gib to 0.02" in warning


def test_a_step_that_would_leave_hardly_any_memory_ends_the_arena_and_not_the_hub(monkeypatch, caplog):
    """The kernel kills a process that reserves more than its control group may have, instead of refusing it."""
    left, niceness = iter([2**30, 2**29, arena_module.SPARE_BYTES]), set[int]()

    def available_bytes() -> int:
        niceness.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return next(left)

    monkeypatch.setattr(arena_module, "STEP", 2**16)
    monkeypatch.setattr(arena_module, "available_bytes", available_bytes)
    arena = Arena(2**20)
    asyncio.run(arena.reserve())
    assert niceness == {arena_module.NICENESS}, "an engine's work comes first"
    assert arena.progress == (3 * 2**16 - 4096, 3 * 2**16 - 4096)
    assert "hardly any memory left" in caplog.text
    arena.close()


@pytest.mark.alone
def test_pages_lie_on_all_nodes_in_turn_from_the_first_on(monkeypatch, caplog):
    """The kernel asks for the policy when it makes a page. A container that may set none has an arena all the same."""

    def refuse(address, size, nodes):
        before.append((size, nodes, os.statvfs(SHM).f_bfree))
        raise PermissionError("mbind: Operation not permitted")

    before, free = [], os.statvfs(SHM).f_bfree
    monkeypatch.setattr(arena_module, "interleave", refuse)
    monkeypatch.setattr(arena_module, "memory_nodes", lambda: [0, 2, 65])
    Arena(2**20).close()
    assert before == [(2**20 + 4096, [0, 2, 65], free)]
    assert "--cap-add SYS_NICE" in caplog.text


def test_the_shared_memory_of_a_container_that_fits_no_chunk_is_named_with_the_flag(make_hub):
    large = msgspec.structs.replace(LAYOUT, layers=LAYOUT.layers * 2)
    with pytest.raises(ArenaFull, match=r"not one chunk of this model fits: .*--shm-size=16g.*an emptyDir volume"):
        make_hub(1).join(namespace=namespace(layout=large)).reserve(tokens(1, 32))
