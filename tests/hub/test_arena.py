"""Shared memory: made whole, found by name, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from blendhub.arena_view import SHM, ArenaName, ArenaView
from blendhub.errors import HubError, InvalidInput
from blendhub.hub.arena import Arena, remove_leftovers

HOLD = """
import time
from blendhub.hub.arena import Arena
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


def test_an_arena_that_is_given_up_while_it_is_made_leaves_nothing(monkeypatch):
    monkeypatch.setattr("blendhub.hub.arena.STEP", 1 << 16)

    async def give_up() -> None:
        before = set(SHM.iterdir())
        making = asyncio.ensure_future(Arena.made(1 << 20))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(set(SHM.iterdir()) - before) == 1
        making.cancel()
        await asyncio.wait((making,))
        assert making.cancelled() and not set(SHM.iterdir()) - before

    asyncio.run(give_up())


def test_another_arena_of_the_same_name_is_not_mapped():
    arena = Arena(1 << 12)
    with pytest.raises(HubError, match="another machine"):
        ArenaView(ArenaName(arena.name.segment, "other nonce", 1 << 12))
    with pytest.raises(HubError, match="another machine"):
        ArenaView(ArenaName("blendhub-nowhere", arena.name.nonce, 1 << 12))
    arena.close()


def test_an_arena_that_does_not_fit_names_the_size_that_would():
    room = os.statvfs(SHM)
    size = room.f_bavail * room.f_frsize + (1 << 20)
    with pytest.raises(HubError, match=r"set arena_gib to at most \d+\.\d\d"):
        Arena(size)


@pytest.mark.slow
def test_what_a_killed_hub_left_is_removed_and_what_a_live_one_has_is_not():
    holders = [subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    dead, alive = (holder.stdout.readline().strip() for holder in holders)
    os.kill(holders[0].pid, signal.SIGKILL)
    holders[0].wait()
    deadline = time.monotonic() + 5
    while (SHM / dead).exists() and time.monotonic() < deadline:
        remove_leftovers()
    assert not (SHM / dead).exists() and (SHM / alive).exists()
    holders[1].kill()
    holders[1].wait()
    assert alive in remove_leftovers()
