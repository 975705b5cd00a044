"""A hub frees its memory without garbage collections, so in a process that runs only a hub, full ones look at each
object once. Memory of large messages goes back to the system."""

import gc

import pytest

from blendhub.client import wire
from tests.hub.hub_direct import tokens
from tests.hub.processes import run_python

COLLECTIONS = """
import gc, weakref
from blendhub.hub.process_tuning import tune_process

class Task:
    pass

looked_at = []

def count(phase, facts):
    if (phase, facts["generation"]) == ("start", 2):
        looked_at.append(len(gc.get_objects()))

gc.callbacks.append(count)
tune_process()
task = Task()
task.itself = task
gc.collect(1)  # the cycle is old now
dropped = weakref.ref(task)
del task
kept = [[] for _ in range(300_000)]
print(len(looked_at) > 1, sum(looked_at) < 400_000, gc.get_freeze_count() > 200_000, dropped())
"""

LARGE_AMONG_SMALL = """
from benchmarks.memory import own_bytes
from blendhub.hub.process_tuning import tune_process

tune_process()
bytes(30 * 2**20)  # the largest block freed so far
before, small, large = own_bytes(), [], []
for number in range(30):
    large.append(b"x" * (2**21 + number))
    small.append(bytearray(4096))
del large
print(own_bytes() - before < 2**22)
"""


@pytest.mark.parametrize(
    "code, printed",
    [(COLLECTIONS, "True True True None\n"), (LARGE_AMONG_SMALL, "True\n")],
    ids=["looks at each object once, and frees old cycles", "returns large blocks"],
)
def test_a_process_of_a_hub(code, printed):
    assert run_python(code).communicate(timeout=60)[0] == printed


def use_up(hub, rounds):
    """Store more than fits into the arena, look it up, clear it, and unregister."""
    for number in range(rounds):
        member = hub.join(f"engine {number}")
        for text in range(30):
            member.store(tokens(1000 * number + text, 96))
        member.read(tokens(1000 * number + 29, 96))
        member.ask(wire.Abort, lease=member.reserve(tokens(1000 * number + 99, 64)).lease)
        member.ask(wire.Clear)
        member.ask(wire.Unregister)


@pytest.mark.slow
def test_a_hub_frees_its_state_without_a_collection(hub):
    use_up(hub, 2)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        use_up(hub, 5)
        gc.collect()
        kinds = {type(garbage).__name__ for garbage in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {"Chunk", "Run", "EngineEntry", "Session", "ReadLease", "WriteLease", "Quarantine"} & kinds, kinds
