"""Eviction policies, compared with simple models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.hub.memory.eviction import LRU, POLICIES, S3FIFO

NAMES = ["insert", "touch", "hold", "release", "remove", "evict"]
calls = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=120)


@pytest.mark.parametrize("name", POLICIES)
@given(calls=calls)
def test_a_policy_has_what_was_inserted_and_evicts_nothing_held(name, calls):
    policy, known, held = POLICIES[name](), set(), set()
    for call, key in calls:
        if call == "insert" and key not in known:
            policy.insert(key, key % 4)
            known.add(key)
        elif call == "touch" and key in known:
            policy.touch(key)
        elif call == "hold" and key in known - held:
            policy.hold(key)
            held.add(key)
        elif call == "release" and key in held:
            policy.release(key)
            held.discard(key)
        elif call == "remove" and key in known:
            policy.remove(key)
            known.discard(key)
            held.discard(key)
        elif call == "evict":
            evicted = policy.evict()
            if evicted is None:
                assert known == held
            else:
                assert evicted in known - held
                known.discard(evicted)
        assert len(policy) == len(known)
        assert all((key in policy) == (key in known) for key in range(10))


@given(calls)
def test_lru_evicts_the_longest_unused(calls):
    policy, order, held = LRU(), [], set()
    for call, key in calls:
        if call == "insert" and key not in order and key not in held:
            policy.insert(key, key)
            order.append(key)
        elif call == "touch" and (key in order or key in held):
            policy.touch(key)
            order += [order.pop(order.index(key))] if key in order else []
        elif call == "hold" and key in order:
            policy.hold(key)
            order.remove(key)
            held.add(key)
        elif call == "release" and key in held:
            policy.release(key)
            held.remove(key)
            order.append(key)
        elif call == "remove" and key in order:
            policy.remove(key)
            order.remove(key)
        elif call == "evict":
            assert policy.evict() == (order.pop(0) if order else None)


def test_s3fifo_does_not_take_being_held_for_a_use():
    policy = S3FIFO()
    for key in range(3):
        policy.insert(key, key)
        policy.hold(key)
        policy.release(key)
    assert [policy.evict() for _ in range(4)] == [0, 1, 2, None]


def hits(policy, requests, capacity):
    held, found = set(), 0
    for key in requests:
        if key in held:
            policy.touch(key)
            found += 1
            continue
        while len(held) >= capacity:
            held.discard(policy.evict())
        policy.insert(key, key)
        held.add(key)
    return found


def test_s3fifo_keeps_what_is_used_through_a_scan_that_lru_forgets_it_in():
    working_set = list(range(50))
    requests = working_set * 4
    for scan in range(10):
        requests += [1000 + scan * 200 + at for at in range(200)]
        requests += working_set
    assert hits(S3FIFO(), requests, 100) > hits(LRU(), requests, 100) + 400


def test_s3fifo_lets_a_ghost_straight_into_the_main_queue():
    policy = S3FIFO()
    for key in range(20):
        policy.insert(key, key)
    policy.touch(5)
    gone = [policy.evict() for _ in range(6)]
    policy.insert(100, gone[-1])
    assert 100 in policy._main
