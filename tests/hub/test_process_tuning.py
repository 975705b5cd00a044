"""A hub frees its memory without garbage collections, so in a process that runs only a hub, full ones look at each
object once. Memory of large messages goes back to the system."""

import gc

import pytest

from blendhub.client import wire
from tests.hub.hub_direct import tokens
from tests.hub.processes import run_python

LOOKED_AT_BY_FULL_COLLECTIONS = """
import gc
from blendhub.hub.process_tuning import collect_survivors_once

looked_at = []

def count(phase, facts):
    if (phase, facts["generation"]) == ("start", 2):
        looked_at.append(len(gc.get_objects()))

gc.callbacks.append(count)
collect_survivors_once()
kept = [[] for _ in range(300_000)]
print(len(looked_at) > 1, sum(looked_at) < 400_000, gc.get_freeze_count() > 200_000)
"""

A_CYCLE_THAT_HAS_BECOME_OLD = """
import gc, weakref
from blendhub.hub.process_tuning import collect_survivors_once

class Task:
    pass

collect_survivors_once()
task = Task()
task.itself = task
gc.collect(1)  # it is old now
dropped = weakref.ref(task)
del task
kept = [[] for _ in range(300_000)]
print(dropped())
"""

LARGE_AMONG_SMALL = """
from benchmarks.memory import own_bytes
from blendhub.hub.process_tuning import return_large_blocks

return_large_blocks()
bytes(30 * 2**20)  # the largest block freed so far
before, small, large = own_bytes(), [], []
for number in range(30):
    large.append(b"x" * (2**21 + number))
    small.append(bytearray(4096))
del large
print(own_bytes() - before)
"""


def use_up(hub, rounds):
    """Store more than fits into the arena, look it up, clear it, and unregister."""
    for number in range(rounds):
        member = hub.join(engine=f"engine {number}")
        texts = [tokens(1000 * number + text, 96) for text in range(30)]
        for text in texts:
            member.store(text)
        member.ask(wire.Release, lease=member.lookup(texts[-1]).lease)
        member.ask(wire.Abort, lease=member.reserve(tokens(1000 * number + 99, 64)).lease)
        member.ask(wire.Clear)
        member.ask(wire.Unregister)


@pytest.mark.slow
def test_a_hub_frees_its_state_without_a_collection(hub):
    use_up(hub, 2)
    gc.collect()
    gc.disable()
    try:
        use_up(hub, 5)
        kinds = [type(found).__name__ for found in _garbage()]
    finally:
        gc.enable()
    assert not {"Chunk", "Run", "EngineEntry", "Session", "ReadLease", "WriteLease", "Quarantine"} & set(kinds), kinds


def _garbage():
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def is_less_than_4_mib(printed):
    return int(printed) < 2**22


@pytest.mark.parametrize(
    "code, holds",
    [
        (LOOKED_AT_BY_FULL_COLLECTIONS, "True True True\n".__eq__),
        (A_CYCLE_THAT_HAS_BECOME_OLD, "None\n".__eq__),
        (LARGE_AMONG_SMALL, is_less_than_4_mib),
    ],
    ids=["looks at each object once", "collects old cycles", "returns large blocks"],
)
def test_a_process_of_a_hub(code, holds):
    printed = run_python(code).communicate(timeout=60)[0]
    assert holds(printed), printed
