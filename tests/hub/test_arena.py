"""Shared memory: reserved completely, mapped by name, and always removed."""

import logging
import os
import signal

import numpy as np
import pytest

from blendhub.client.arena_view import SHM, ArenaName, ArenaView, header_of
from blendhub.core.errors import HubError, InvalidInput
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.segments import remove_leftovers
from harness.namespaces import skip_unless_permitted
from tests.hub.processes import IN_A_CONTAINER, IN_A_PLACE, python_of, run_python, until

HUGE_PAGES = """
from pathlib import Path
from blendhub.hub.memory.arena import Arena
def huge():
    return next(int(line.split()[1]) for line in Path("/proc/meminfo").open() if line.startswith("ShmemHugePages"))
def mapped():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("RssShmem"))
before = huge(), mapped()
arena = Arena(1 << 25)
print(huge() - before[0], mapped() - before[1])
arena.close()
"""


HOLD = """
import time
from blendhub.hub.memory.arena import Arena
arena = Arena(1 << 20)
print(arena.name.segment, flush=True)
time.sleep(60)
"""


def test_what_one_side_writes_the_other_reads():
    arena = Arena(1 << 16)
    view = ArenaView(arena.name)
    view.slot(100, 5)[:] = np.frombuffer(b"bytes", np.uint8)
    assert bytes(arena.slot(100, 5)) == b"bytes"
    assert os.stat(SHM / arena.name.segment).st_mode & 0o777 == 0o600
    with pytest.raises(InvalidInput, match="not inside"):
        view.slot(1 << 16, 1)
    arena.close()
    assert not (SHM / arena.name.segment).exists()
    assert bytes(view.slot(100, 5)) == b"bytes", "who maps it keeps it"


def test_another_arena_of_the_same_name_is_not_mapped():
    arena = Arena(1 << 12)
    with pytest.raises(HubError, match=r"another hub's arena.*docker run --ipc=host"):
        ArenaView(ArenaName(arena.name.segment, "other nonce", 1 << 12))
    with pytest.raises(HubError, match=r"No such file or directory.*docker run --ipc=host"):
        ArenaView(ArenaName("blendhub-nowhere", arena.name.nonce, 1 << 12))
    path = SHM / arena.name.segment
    larger = ArenaName(arena.name.segment, arena.name.nonce, 1 << 30)
    path.write_bytes(header_of(larger) + bytes(5000))
    with pytest.raises(HubError, match="cannot map the hub's arena"):
        ArenaView(larger)
    path.write_bytes(b"something else")
    with pytest.raises(HubError, match="does not begin as an arena"):
        ArenaView(larger)
    arena.close()


def test_a_mapping_is_seen_until_the_last_array_over_it_is_gone():
    arena = Arena(1 << 12)
    view = ArenaView(arena.name)
    mapping, part = view.mapping, view.slot(0, 64)
    assert arena.is_mapped_by(mapping) and not arena.is_mapped_by(mapping + 1)
    del view
    assert arena.is_mapped_by(mapping)
    del part
    assert not arena.is_mapped_by(mapping)
    arena.close()


@pytest.mark.slow
@pytest.mark.parametrize("within", [(), IN_A_CONTAINER], ids=["beside it", "in a container"])
@pytest.mark.alone
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


@pytest.mark.alone
def test_huge_pages_are_advised_before_the_memory_is_reserved():
    """The file system decides about a page when it is created. The hub keeps none in its page tables."""
    within = [*IN_A_PLACE, "size=256m,huge=advise"]
    skip_unless_permitted(within)
    made = run_python(HUGE_PAGES, within=within)
    huge_kib, mapped_kib = map(int, made.communicate(timeout=60)[0].split())
    assert huge_kib >= 2**14 and mapped_kib < 2**12


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "link", "another user's"])
def test_what_is_only_named_like_an_arena_stops_no_hub(kind, tmp_path, caplog):
    path = SHM / f"blendhub-{os.getuid()}-{'0' * 16}"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "precious")
        (tmp_path / "precious").write_text("precious")
    else:
        if os.geteuid():
            pytest.skip("only root can give files away")
        path.touch()
        os.chown(path, 12345, 12345)
    try:
        with caplog.at_level(logging.WARNING):
            assert remove_leftovers() == []
        assert f"skipped {path}" in caplog.text and os.path.lexists(path)
        Arena(1 << 16).close()
    finally:
        path.unlink()
