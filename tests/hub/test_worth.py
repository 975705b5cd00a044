"""What requests say of the worth of their KV: it is evicted last or first, and no more than that."""

import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import Variant
from blendhub.hub.memory.kept_chunks import ALL_KEPT_SHARE, GRAIN_S, KEPT_SHARE
from tests.hub.hub_direct import CHUNK, tokens

N_SLOTS = 64
QUOTA = int(KEPT_SHARE * N_SLOTS)


@pytest.fixture
def hub(make_hub):
    return make_hub(n_slots=N_SLOTS, silence_s=1e5, read_lease_s=1e5)


def churn(hub, member, n_chunks=3 * N_SLOTS, first=1000):
    """Store as much as the arena holds, several times."""
    for seed in range(first, first + n_chunks):
        member.store(tokens(seed, CHUNK))
    hub.state.check_integrity()


def left(member, text, variant=Variant()):  # noqa: B008
    found = member.lookup(text, acquire=False, variant=variant)
    return sum(len(match.span) for match in found.matches) // CHUNK


def kept(hub):
    return len(hub.state.cache.policy.kept)


def test_what_is_kept_outlives_other_kv_for_as_long_as_it_was_asked_for(hub):
    member, text = hub.join(), tokens(1, 4 * CHUNK)
    member.store(text, keep_s=600.0)
    churn(hub, member)
    assert left(member, text) == 4 and kept(hub) == 4
    hub.now += 600 + GRAIN_S
    hub.service.tick()
    assert kept(hub) == 0
    churn(hub, member, first=5000)
    assert left(member, text) == 0


def test_what_a_prompt_reuses_is_kept_as_well(hub):
    member, text = hub.join(), tokens(1, 4 * CHUNK)
    member.store(text)
    found = member.lookup(text, keep_s=600.0)
    churn(hub, member)
    member.ask(wire.Release, lease=found.lease)
    churn(hub, member, first=5000)
    assert left(member, text) == 4


def test_a_namespace_keeps_no_more_than_its_quota(hub):
    """A tenant that keeps everything for a day costs the others an eighth of the arena."""
    member, greedy = hub.join(), Variant(cache_salt="greedy")
    for seed in range(100, 100 + N_SLOTS):
        member.store(tokens(seed, CHUNK), variant=greedy, keep_s=86_400.0)
        assert kept(hub) <= QUOTA
    churn(hub, member)
    assert sum(left(member, tokens(seed, CHUNK), greedy) for seed in range(100, 100 + N_SLOTS)) == QUOTA
    assert hub.state.cache.policy.kept.refused == N_SLOTS - QUOTA


def test_all_namespaces_together_keep_no_more_than_half(hub):
    member = hub.join()
    for tenant in range(8):
        for seed in range(QUOTA):
            member.store(tokens(100 + tenant * QUOTA + seed, CHUNK), variant=Variant(cache_salt=f"{tenant}"), keep_s=60)
    assert kept(hub) == ALL_KEPT_SHARE * N_SLOTS
    hub.state.check_integrity()


def test_a_prompt_as_large_as_the_arena_evicts_what_is_kept(hub):
    """Keeping is a bonus, no pin."""
    member, text = hub.join(), tokens(1, 4 * CHUNK)
    member.store(text, keep_s=600.0)
    assert len(member.store(tokens(2, N_SLOTS * CHUNK)).slots) == N_SLOTS
    assert left(member, text) == 0 and kept(hub) == 0
    hub.state.check_integrity()


def test_what_is_not_worth_keeping_goes_first_and_never_to_the_store(make_hub, tmp_path):
    hub = make_hub(n_slots=N_SLOTS, store=tmp_path / "store")
    member = hub.join()
    worthless = tokens(1, 4 * CHUNK)
    for seed in range(10, 20):
        member.store(tokens(seed, CHUNK))
    member.store(worthless, drop=True)
    assert left(member, worthless) == 4
    hub.settle()
    assert hub.tier.writer.saved == 10
    churn(hub, member, N_SLOTS - 10)
    assert left(member, worthless) == 0
    assert sum(left(member, tokens(seed, CHUNK)) for seed in range(10, 20)) == 10


def test_kept_text_that_is_deleted_is_kept_no_more(hub):
    member = hub.join()
    member.store(tokens(1, 4 * CHUNK), keep_s=600.0, request="chatcmpl-a-1a2b3c4d")
    found = member.read(tokens(1, 4 * CHUNK))
    assert hub.ask(wire.Forget(request="chatcmpl-a")).chunks == 4
    hub.now += 700
    hub.service.tick()
    member.ask(wire.Release, lease=found.lease)
    hub.state.check_integrity()
    assert kept(hub) == 0


def test_the_two_exclude_each_other(hub):
    with pytest.raises(InvalidInput, match="not both"):
        hub.join().reserve(tokens(1, CHUNK), keep_s=1.0, drop=True)
