"""The order of eviction, compared with simple models."""

from hypothesis import given
from hypothesis import strategies as st

from blendhub.hub.memory.eviction import S3FIFO

NAMES = ["insert", "touch", "hold", "release", "remove", "evict"]
calls = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=120)


@given(calls=calls)
def test_it_has_what_was_inserted_and_evicts_nothing_held(calls):
    policy, known, held = S3FIFO(), set(), set()
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


def test_what_is_used_stays_through_scans_of_texts_that_never_repeat():
    working_set = list(range(50))
    requests = working_set * 4
    for scan in range(10):
        requests += [1000 + scan * 200 + at for at in range(200)]
        requests += working_set
    # The least recently used key would be forgotten in each scan: 150 hits.
    assert hits(S3FIFO(), requests, 100) > 550
