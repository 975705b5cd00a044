"""A hub frees its memory without full garbage collections, so a process that runs only a hub disables them. Memory of
large messages goes back to the system."""

import gc

import pytest
from hub_direct import tokens
from processes import run_python

from blendhub import wire

COLLECTIONS_OF_ALL = """
import gc
from blendhub.hub.process_tuning import disable_full_collections

generations = set()
gc.callbacks.append(lambda phase, facts: generations.add(facts["generation"]))
disable_full_collections()
kept = [[] for _ in range(300_000)]
print(*sorted(generations))
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


def test_only_young_generations_are_collected():
    process = run_python(COLLECTIONS_OF_ALL)
    assert process.communicate(timeout=60)[0] == "0 1\n"


def test_large_blocks_among_small_ones_are_returned():
    process = run_python(LARGE_AMONG_SMALL)
    assert int(process.communicate(timeout=60)[0]) < 2**22
