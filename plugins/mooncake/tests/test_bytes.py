"""What is put is what is got, or nothing, in a real cluster; whatever is killed or stopped: no wrong byte, an answer by
the deadline, and recovery without a restart."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from blendhub_mooncake.bytes import MooncakeBytes
from blendhub_mooncake.codes import CodeMeaning, of_get, of_put
from blendhub_mooncake.frames import ChildSetup

from blendhub.core.errors import InvalidInput, StoreAway, StoreFailed
from blendhub.hub.memory.arena import Arena
from harness.servers.mooncake_cluster import Cluster
from harness.waiting import wait_until
from plugins.mooncake.tests.members import child_of

pytestmark = [pytest.mark.slow, pytest.mark.alone]
MIB = 2**20
DONE, ABSENT, FAILED, ADRIFT = CodeMeaning
DEADLINE_S = 2.0
SLACK_S = 1.0
RECOVERY_S = 60.0


@pytest.fixture
def place(lasting_cluster: Cluster, setup_for: Callable[[Cluster], ChildSetup]) -> Iterator[MooncakeBytes]:
    with contextlib.closing(MooncakeBytes(setup_for(lasting_cluster), 20.0)) as place:
        yield place


def test_a_batch_of_any_sizes_comes_back_at_other_offsets(place: MooncakeBytes, arena: Arena) -> None:
    sizes = [1, 4095, 4096, 65_537, 3 * MIB + 1, 16 * MIB]
    keys = [f"group/{size}" for size in sizes]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    for start, size in zip(starts, sizes, strict=True):
        arena.slot(start, size)[:] = np.random.default_rng(size).bytes(size)
    assert place.put(keys, list(zip(starts, sizes, strict=True))) == [True] * len(keys)
    arena.slot(0, 64 * MIB)[:] = bytes(64 * MIB)
    before = place.stats()
    others = [start + 30 * MIB + 7 for start in starts]
    assert place.get([*keys, "never"], [*zip(others, sizes, strict=True), (0, MIB)]) == [*[True] * len(keys), False]
    for other, size in zip(others, sizes, strict=True):
        assert bytes(arena.slot(other, size)) == np.random.default_rng(size).bytes(size)
    assert bytes(arena.slot(MIB, 29 * MIB)) == bytes(29 * MIB), "a get wrote outside its extents"
    counted = {name: value - before[name] for name, value in place.stats().items() if value != before[name]}
    assert counted == {"mooncake_get_keys": 6, "mooncake_get_absent": 1}
    assert place.get([keys[4]], [(0, sizes[4] + 1)]) == [False], "an object that is shorter than the span"


def test_extents_outside_the_arena_and_keys_that_are_named_twice_are_refused(place: MooncakeBytes) -> None:
    for extent in ((0, 0), (-1, 4), (64 * MIB - 3, 4), (64 * MIB, 1), (2**70, 1)):
        with pytest.raises(InvalidInput, match="not inside an arena"):
            place.get(["key"], [extent])
    with pytest.raises(InvalidInput, match="distinct keys"):  # Mooncake would fill one span only
        place.get(["key", "key"], [(0, 1), (1, 1)])


def test_a_key_is_absent_only_when_that_is_certain_and_adrift_unless_its_transfer_has_ended(place, monkeypatch) -> None:
    gets = {
        **{4096: DONE, 4095: ABSENT, 0: ABSENT, -704: ABSENT, -712: ABSENT},
        **{-703: FAILED, -707: FAILED, -900: FAILED, -800: ADRIFT, -1: ADRIFT, -31337: ADRIFT},
    }
    puts = {0: DONE, -200: ABSENT, -900: FAILED, -704: ADRIFT, -800: ADRIFT, -31337: ADRIFT}
    assert {code: of_get(code, 4096) for code in gets} == gets
    assert {code: of_put(code) for code in puts} == puts
    # A master that does not answer is away, and other failures are not.
    for codes, error in (([-900, -901], StoreAway), ([-900, -707], StoreFailed)):
        monkeypatch.setattr(place, "_call", lambda call, codes=codes: (place._process, codes))
        with pytest.raises(StoreFailed, match="2 of its keys failed, the first with code -900") as raised:
            place.get(["one", "other"], [(0, MIB), (MIB, MIB)])
        assert type(raised.value) is error


# Failures.


def content(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(4 * MIB)


def is_alive(pid: int) -> bool:
    """Not so for one that is dead and that its parent has not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Ledger:
    """Puts and gets one chunk at a time, and holds every get against what was put."""

    def __init__(self, place: MooncakeBytes, arena: Arena) -> None:
        self.place, self._arena = place, arena
        self.keys: list[int] = []
        self.seeds = itertools.count()

    @property
    def pid(self) -> int:
        """The process that calls Mooncake for the place."""
        return child_of(os.getpid())

    def put(self) -> bool:
        seed = next(self.seeds)
        self._arena.slot(0, 4 * MIB)[:] = content(seed)
        if not self._in_time(lambda: self.place.put([f"chunk {seed}"], [(0, 4 * MIB)])):
            return False
        self.keys.append(seed)
        return True

    def get(self, seed: int) -> bool:
        slot = self._arena.slot(8 * MIB, 4 * MIB)
        slot[:] = bytes(4 * MIB)
        is_there = self._in_time(lambda: self.place.get([f"chunk {seed}"], [(8 * MIB, 4 * MIB)]))
        assert not is_there or bytes(slot) == content(seed), f"wrong bytes for chunk {seed}"
        return is_there

    def works(self) -> bool:
        """A chunk goes in, and comes back."""
        return self.put() and self.get(self.keys[-1])

    def _in_time(self, call: Callable[[], list[bool]]) -> bool:
        begun = time.monotonic()
        try:
            return call() == [True]
        except StoreFailed:
            return False
        finally:
            assert time.monotonic() - begun < DEADLINE_S + SLACK_S


@pytest.fixture
def ledger(cluster: Cluster, setup_for: Callable[[Cluster], ChildSetup], arena: Arena) -> Iterator[Ledger]:
    """The ledger of a place that was opened before there was a master."""
    with contextlib.closing(MooncakeBytes(setup_for(cluster), DEADLINE_S)) as place:
        ledger = Ledger(place, arena)
        assert not ledger.get(99)
        cluster.start_master()
        cluster.start_node()
        wait_until(ledger.works, RECOVERY_S)
        yield ledger


def test_a_process_that_is_killed_or_stopped_is_replaced_and_finds_what_was_stored(ledger: Ledger) -> None:
    first = ledger.keys[0]
    starts = ledger.place.stats()["mooncake_starts"]
    os.kill(ledger.pid, signal.SIGKILL)
    wait_until(lambda: ledger.get(first), RECOVERY_S)
    assert ledger.place.stats()["mooncake_starts"] == starts + 1
    pid = ledger.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StoreFailed, match="did not answer a get in time"):
        ledger.place.get(["chunk 0"], [(0, 4 * MIB)])
    assert not is_alive(pid)
    wait_until(lambda: ledger.get(first), RECOVERY_S)
    # Every call under way fails when the process is killed: more callers than lanes, all of them answered.
    pid = ledger.pid
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(ledger.place.put, [f"key {at}"], [(at * MIB, 8 * MIB)]) for at in range(8)]
        time.sleep(0.2)
        assert not any(call.done() for call in calls)
        os.kill(pid, signal.SIGKILL)
        assert {type(call.exception(DEADLINE_S)) for call in calls} == {StoreAway}
    wait_until(ledger.works, RECOVERY_S)
    pid = ledger.pid
    ledger.place.close()
    ledger.place.close()
    assert not is_alive(pid)
    with pytest.raises(StoreFailed, match="it is closed"):
        ledger.place.get(["key"], [(0, 1)])


def test_a_get_that_comes_too_late_writes_nothing_and_killed_servers_cost_what_they_had(
    ledger: Ledger, cluster: Cluster, arena: Arena
) -> None:
    """The hub gives the slot to something else when the call has ended, and then the node sends what was asked for."""
    (node,) = cluster.nodes
    os.kill(node.pid, signal.SIGSTOP)
    assert not ledger.get(ledger.keys[0])
    arena.slot(8 * MIB, 4 * MIB)[:] = content(99)
    with contextlib.suppress(ProcessLookupError):  # what does not answer is killed
        os.kill(node.pid, signal.SIGCONT)
    time.sleep(2)
    assert bytes(arena.slot(8 * MIB, 4 * MIB)) == content(99)
    wait_until(ledger.works, RECOVERY_S)
    pid, last = ledger.pid, ledger.keys[-1]
    node.kill()
    assert not ledger.get(last)
    assert not is_alive(pid), "a transfer failed, so it may still have been writing"
    # So does a killed master.
    assert cluster.master is not None
    cluster.master.kill()
    cluster.master.wait()
    assert not ledger.works()
    cluster.start_master()
    cluster.start_node()
    wait_until(ledger.works, RECOVERY_S)
    wait_until(lambda: ledger.place.get([f"chunk {last}"], [(0, 4 * MIB)]) == [False], RECOVERY_S)
