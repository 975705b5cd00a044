"""Whatever is killed or stopped: no wrong byte, an answer by the deadline, and recovery without a restart."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blendhub_mooncake.bytes import MooncakeBytes
from blendhub_mooncake.frames import ChildSetup

from blendhub.core.errors import StoreFailed
from blendhub.hub.memory.arena import Arena
from harness.servers.mooncake_cluster import Cluster
from harness.waiting import wait_until
from plugins.mooncake.tests.members import stopped

pytestmark = [pytest.mark.slow, pytest.mark.alone]
MIB = 2**20
DEADLINE_S = 3.0
SLACK_S = 1.0
STOPPED_S = 30.0
RECOVERY_S = 60.0


def content(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(4 * MIB)


def pid_of(place: MooncakeBytes) -> int:
    assert place.pid is not None
    return place.pid


class Ledger:
    """Puts and gets one chunk at a time, and holds every get against what was put."""

    def __init__(self, place: MooncakeBytes, arena: Arena) -> None:
        self.place, self._arena = place, arena
        self.keys: list[int] = []
        self.failures = 0

    def put(self) -> bool:
        seed = len(self.keys) + self.failures
        self._arena.slot(0, 4 * MIB)[:] = content(seed)
        stored = self._in_time(lambda: self.place.put([f"chunk {seed}"], [(0, 4 * MIB)]))
        if stored:
            self.keys.append(seed)
        else:
            self.failures += 1
        return stored

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
def place(cluster: Cluster, open_bytes: Callable[..., MooncakeBytes]) -> MooncakeBytes:
    cluster.start_master()
    cluster.start_node()
    place = open_bytes(cluster, DEADLINE_S)
    assert place.wait_until_ready(60)
    return place


@pytest.fixture
def ledger(place: MooncakeBytes, arena: Arena) -> Ledger:
    ledger = Ledger(place, arena)
    assert ledger.works()
    return ledger


def test_a_process_that_is_killed_or_stopped_is_replaced_and_finds_what_was_stored(ledger: Ledger) -> None:
    os.kill(pid_of(ledger.place), signal.SIGKILL)
    wait_until(lambda: ledger.get(0), RECOVERY_S)
    assert ledger.place.stats()["mooncake_starts"] == 2
    pid = pid_of(ledger.place)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(StoreFailed, match="did not answer a get in time"):
        ledger.place.get(["chunk 0"], [(0, 4 * MIB)])
    assert not _is_alive(pid)
    wait_until(lambda: ledger.get(0), RECOVERY_S)


def test_every_call_under_way_fails_when_the_process_is_killed(place: MooncakeBytes, arena: Arena) -> None:
    """More callers than lanes, all of them answered."""
    answers: list[object] = []

    def call(at: int) -> None:
        try:
            answers.append(place.put([f"key {at}"], [(at * MIB, 8 * MIB)]))
        except StoreFailed as error:
            answers.append(error)

    os.kill(pid_of(place), signal.SIGSTOP)
    callers = [threading.Thread(target=call, args=[at]) for at in range(8)]
    for caller in callers:
        caller.start()
    time.sleep(0.2)
    assert not answers
    os.kill(pid_of(place), signal.SIGKILL)
    for caller in callers:
        caller.join(DEADLINE_S)
    assert len(answers) == 8
    assert all(isinstance(answer, StoreFailed) for answer in answers)


def test_a_get_that_comes_too_late_writes_nothing(ledger: Ledger, cluster: Cluster, arena: Arena) -> None:
    """The hub gives the slot to something else when the call has ended, and then the node sends what was asked for."""
    (node,) = cluster.nodes
    with stopped(node.pid):
        assert not ledger.get(0)
        arena.slot(8 * MIB, 4 * MIB)[:] = content(99)
    time.sleep(2)
    assert bytes(arena.slot(8 * MIB, 4 * MIB)) == content(99)
    wait_until(ledger.works, RECOVERY_S)


def test_a_killed_master_costs_what_it_knew_and_the_next_one_serves(ledger: Ledger, cluster: Cluster) -> None:
    assert cluster.master is not None
    cluster.master.kill()
    cluster.master.wait()
    assert not ledger.works()
    cluster.start_master()
    wait_until(ledger.works, RECOVERY_S)
    assert not ledger.get(0)


@pytest.mark.long
@pytest.mark.parametrize("which", ["master", "node"])
def test_a_stopped_server_costs_reuse_while_it_is(ledger: Ledger, cluster: Cluster, which: str) -> None:
    server = cluster.master if which == "master" else cluster.nodes[0]
    assert server is not None
    with stopped(server.pid):
        end = time.monotonic() + STOPPED_S
        while time.monotonic() < end:
            assert not ledger.works()
    wait_until(ledger.works, RECOVERY_S)


def test_what_a_killed_node_had_is_absent_and_another_node_serves(ledger: Ledger, cluster: Cluster) -> None:
    pid = pid_of(ledger.place)
    cluster.nodes[0].kill()
    assert not ledger.get(0)
    assert not _is_alive(pid), "a transfer failed, so it may still have been writing"
    cluster.start_node()
    wait_until(ledger.works, RECOVERY_S)
    wait_until(lambda: ledger.place.get(["chunk 0"], [(0, 4 * MIB)]) == [False], RECOVERY_S)


def test_it_opens_without_a_master_and_serves_when_there_is_one(
    cluster: Cluster, arena: Arena, open_bytes: Callable[..., MooncakeBytes]
) -> None:
    begun = time.monotonic()
    ledger = Ledger(open_bytes(cluster, DEADLINE_S), arena)
    with pytest.raises(StoreFailed, match="Mooncake could not get 1 keys: "):
        ledger.place.get(["key"], [(0, 1)])
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S
    cluster.start_master()
    cluster.start_node()
    wait_until(ledger.works, RECOVERY_S)


OWNER = """
import sys, time
import msgspec
from blendhub_mooncake.bytes import MooncakeBytes
from blendhub_mooncake.frames import ChildSetup
place = MooncakeBytes(msgspec.json.decode(sys.argv[1], type=ChildSetup), 2.0)
assert place.wait_until_ready(60)
print(place.pid, flush=True)
time.sleep(1e6)
"""


def test_the_process_dies_with_its_owner_even_if_it_is_stopped(
    cluster: Cluster, setup_for: Callable[[Cluster], ChildSetup]
) -> None:
    cluster.start_master()
    argument = msgspec.json.encode(setup_for(cluster)).decode()
    with subprocess.Popen([sys.executable, "-c", OWNER, argument], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        owner.kill()
    wait_until(lambda: not _is_alive(pid), 5)


def test_closing_ends_the_process_and_then_calls_fail(place: MooncakeBytes) -> None:
    pid = pid_of(place)
    place.close()
    place.close()
    assert not _is_alive(pid)
    with pytest.raises(StoreFailed, match="it is closed"):
        place.get(["key"], [(0, 1)])


def _is_alive(pid: int) -> bool:
    """Not so for one that is dead and that its parent has not waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
