"""Eviction policies, compared with simple models."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.hub.eviction import LRU, POLICIES, S3FIFO

calls = st.lists(st.tuples(st.sampled_from(["insert", "touch", "remove", "evict"]), st.integers(0, 9)), max_size=120)


@pytest.mark.parametrize("name", POLICIES)
@given(calls=calls, pinned=st.sets(st.integers(0, 9)))
def test_a_policy_holds_what_was_inserted_and_evicts_nothing_pinned(name, calls, pinned):
    policy, held = POLICIES[name](), set()
    for call, key in calls:
        if call == "insert" and key not in held:
            policy.insert(key, key % 4)
            held.add(key)
        elif call == "touch" and key in held:
            policy.touch(key)
        elif call == "remove" and key in held:
            policy.remove(key)
            held.discard(key)
        elif call == "evict":
            evicted = policy.evict(pinned.__contains__)
            if evicted is None:
                assert held <= pinned
            else:
                assert evicted in held - pinned
                held.discard(evicted)
        assert len(policy) == len(held)
        assert all((key in policy) == (key in held) for key in range(10))


@given(calls)
def test_lru_evicts_the_longest_unused(calls):
    policy, order = LRU(), []
    for call, key in calls:
        if call == "insert" and key not in order:
            policy.insert(key, key)
            order.append(key)
        elif call == "touch" and key in order:
            policy.touch(key)
            order.append(order.pop(order.index(key)))
        elif call == "remove" and key in order:
            policy.remove(key)
            order.remove(key)
        elif call == "evict":
            assert policy.evict(lambda key: False) == (order.pop(0) if order else None)


def hits(policy, requests, capacity):
    held, found = set(), 0
    for key in requests:
        if key in held:
            policy.touch(key)
            found += 1
            continue
        while len(held) >= capacity:
            held.discard(policy.evict(lambda key: False))
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
    gone = [policy.evict(lambda key: False) for _ in range(6)]
    policy.insert(100, gone[-1])
    assert 100 in policy._main
