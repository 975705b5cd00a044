"""The states of recurrent layers: each is that of one prefix, and is found behind that prefix only."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendhub.client import wire
from blendhub.core.errors import LayoutMismatch
from blendhub.core.layout import KVLayout, Variant
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig
from tests.hub.hub_direct import CHUNK, LAYOUT, DirectHub, namespace

STATE = KVLayout(layers=3, kv_heads=1, key_dim=5, value_dim=0, dtype="int8", chunk_tokens=8)
SPACE = namespace(state_layouts=(STATE,))
OF_STATES = Variant(states=True)


def store_state(member, text, n_tokens, value):
    """The state behind so many tokens of a text."""
    reserved = member.reserve(text[:n_tokens], Span(n_tokens - 1, n_tokens), variant=OF_STATES)
    if reserved.lease is not None:
        (slot,) = reserved.slots
        member.view.slot(slot.slot, STATE.shard_bytes)[:] = value
        member.commit(reserved)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_last_state_is_found_up_to_which_kv_has_no_gap(data):
    """Texts share their beginnings; what is found is compared with a search of all that was stored."""
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    trunk = random.integers(0, 99, 6 * CHUNK, dtype=np.uint32)
    hub = DirectHub(HubConfig(), 64, None)
    try:
        member, kv, states = hub.join(namespace=SPACE), [], {}
        for value in range(1, data.draw(st.integers(2, 6))):
            text = np.concatenate(
                [trunk[: data.draw(st.integers(0, 150))], random.integers(0, 99, 60, dtype=np.uint32)]
            )
            n_stored = data.draw(st.integers(1, len(text)))
            member.store(text[:n_stored])
            kv.append(text[:n_stored])
            for n_tokens in data.draw(st.lists(st.integers(1, len(text)), max_size=4)):
                store_state(member, text, n_tokens, value)
                states.setdefault(text[:n_tokens].tobytes(), value)
        base = data.draw(st.sampled_from(kv))
        prompt = np.concatenate([base, random.integers(0, 99, data.draw(st.integers(0, 3)), dtype=np.uint32)])
        skipped = data.draw(st.integers(0, len(prompt) - 1))
        reached = max(_shared(prompt, text) for text in kv)
        usable = [n for n in range(skipped + 1, min(reached, len(prompt) - 1) + 1) if prompt[:n].tobytes() in states]
        found = member.lookup(prompt, skip_prefix_n_tokens=skipped)
        if not usable:
            assert found.state is None
        else:
            assert found.state and found.state.span == Span(usable[-1] - 1, usable[-1])
            kept = member.view.slot(found.state.shard, STATE.shard_bytes)
            assert (kept == states[prompt[: usable[-1]].tobytes()]).all()
        if found.lease is not None:
            member.ask(wire.Release, lease=found.lease)
        hub.state.check_integrity()
    finally:
        hub.close()


def _shared(one, other):
    n = min(len(one), len(other))
    differing = np.flatnonzero(one[:n] != other[:n])
    return int(differing[0]) if len(differing) else n


def test_states_come_back_from_a_store(make_hub, tmp_path):
    text = np.arange(4 * CHUNK, dtype=np.uint32)
    first = make_hub(store=tmp_path / "store")
    member = first.join(namespace=SPACE)
    member.store(text)
    store_state(member, text, 3 * CHUNK, 7)
    first.settle()
    first.close()
    second = make_hub(store=tmp_path / "store")
    member = second.join(namespace=SPACE)
    found = member.lookup(text, wait_s=5.0)
    assert found.state and found.state.span.end == 3 * CHUNK
    assert (member.view.slot(found.state.shard, STATE.shard_bytes) == 7).all()


def test_an_engine_without_recurrent_layers_stores_no_states(hub):
    with pytest.raises(LayoutMismatch, match="no states"):
        hub.join().reserve(np.arange(9, dtype=np.uint32), Span(8, 9), variant=OF_STATES)


def test_a_slot_of_a_state_has_room_for_all_its_rows_on_all_ranks():
    space = namespace(world_size=2, state_layouts=(STATE, STATE)).with_variant(OF_STATES)
    assert space.slot_bytes == 2 * space.shard_bytes and space.shard_bytes >= 2 * STATE.shard_bytes
    assert space.chunks_of(Span(63, 64)) == [Span(63, 64)]
    assert space.base.layout == LAYOUT and not space.base.states
