"""States of recurrent layers: each stands in the slot of the chunk that it ends. Prompts are found up to a state."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendhub.client import wire
from blendhub.core.errors import InvalidInput
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.outcome.reasons import NotReused, Why
from tests.hub.hub_direct import CHUNK, LAYOUT, STATE_ROWS, namespace, tokens

SPACE = namespace(state_layouts=(STATE_ROWS,))
STATE = Provenance(has_state=True)


def state(member, slot):
    """This rank's state in the slot of a chunk."""
    return member.view.slot(slot + SPACE.state_start(member.rank), SPACE.state_bytes)


def store(member, text, *ends):
    """Store a prompt, and a state behind so many tokens of it each, ascending, which its number names."""
    reached = 0
    for at, end in enumerate(ends, 1):
        if reached < end - CHUNK:
            member.store(text, Span(reached, end - CHUNK))
        reached = end
        reserved = member.reserve(text[:end], Span(end - CHUNK, end), provenance=STATE)
        if reserved.lease is not None:
            member.write(reserved, text)
            state(member, reserved.slots[0].slot)[:] = at
            member.commit(reserved)
    if reached < len(text):
        member.store(text, Span(reached, len(text)))


def found(member, prompt, **more):
    """Where the matches end, and the state there."""
    answer = member.lookup(prompt, **more)
    member.check(answer, prompt)
    if answer.lease is None:
        return 0, None
    (at,) = set(state(member, answer.state).tolist())
    member.ask(wire.Release, lease=answer.lease)
    return answer.matches[-1].span.end, at


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_prompt_is_found_up_to_its_last_state_behind_which_it_has_no_gap(make_hub, data):
    """Texts share their beginnings; what is found is compared with all that was stored."""
    trunk, member, stored = tokens(1, 6 * CHUNK), make_hub(64).join(namespace=SPACE), []
    for seed in range(data.draw(st.integers(1, 4))):
        text = np.concatenate([trunk[: data.draw(st.integers(0, len(trunk)))], tokens(seed + 2, 2 * CHUNK)])
        ends = data.draw(st.lists(st.integers(1, len(text) // CHUNK), unique=True, max_size=3))
        store(member, text, *(end * CHUNK for end in sorted(ends)))
        stored.append((text, [end * CHUNK for end in ends]))
    base, _ = data.draw(st.sampled_from(stored))
    prompt = np.concatenate([base[: data.draw(st.integers(1, len(base)))], tokens(9, data.draw(st.integers(0, 3)))])
    skipped = data.draw(st.integers(0, len(prompt) - 1))
    behind = [end for text, ends in stored for end in ends if np.array_equal(text[:end], prompt[:end])]
    expected = max((end for end in behind if end > skipped), default=0)
    answer = member.lookup(prompt, skip_prefix_n_tokens=skipped)
    assert (answer.matches[-1].span.end if answer.matches else 0) == expected
    member.check(answer, prompt)
    reached = max(_shared(prompt, text) for text, _ in stored)
    border = max(expected, skipped)
    assert answer.staying == ((NotReused(Span(border, reached), Why.NO_STATE),) if border < reached else ())
    member.hub.state.check_integrity()


def _shared(one, other):
    n = min(len(one), len(other))
    differing = np.flatnonzero(one[:n] != other[:n])
    return int(differing[0]) if len(differing) else n


def test_behind_a_chunk_that_is_gone_or_not_in_memory_yet_no_state_is_found(make_hub, tmp_path):
    hub = make_hub(64, tmp_path / "store")
    member, text, cache = hub.join(namespace=SPACE), tokens(1, 4 * CHUNK), hub.state.cache
    store(member, text, 2 * CHUNK, 4 * CHUNK)
    hub.settle()
    assert found(member, text) == (4 * CHUNK, 2)
    chunks = {chunk.span.start: chunk for chunk in hub.index.chunks()}
    cache.remove(chunks[2 * CHUNK])
    answer = member.lookup(text, acquire=False)
    assert answer.matches[-1].span.end == 2 * CHUNK and answer.on_the_way == (Span(2 * CHUNK, 3 * CHUNK),)
    hub.settle()
    assert found(member, text) == (4 * CHUNK, 2), "the store has it"
    cache.erase(chunks[2 * CHUNK])
    assert found(member, text) == (2 * CHUNK, 1)
    cache.erase(chunks[0])
    assert found(member, text) == (0, None)


def test_a_state_behind_text_that_other_chunks_have_is_leased_and_fetched_with_it(make_hub, tmp_path):
    hub = make_hub(64, tmp_path / "store")
    member, text = hub.join(namespace=SPACE), tokens(1, 4 * CHUNK)
    member.store(text)
    store(member, text, 2 * CHUNK)
    hub.settle()
    (chunk,) = (chunk for chunk in hub.index.chunks() if chunk.run.provenance.has_state)
    answer = member.lookup(text)
    assert answer.state == chunk.offset and chunk.pins == 1
    member.ask(wire.Release, lease=answer.lease)
    hub.state.cache.remove(chunk)
    answer = member.lookup(text, acquire=False)
    assert not answer.matches and answer.on_the_way == (Span(CHUNK, 2 * CHUNK),)
    hub.settle()
    assert found(member, text) == (2 * CHUNK, 1)


def test_text_elsewhere_is_not_found(hub):
    member, text = hub.join(namespace=SPACE), tokens(1, 4 * CHUNK)
    store(member, text, 4 * CHUNK)
    answer = member.lookup(np.concatenate([tokens(2, 7), text]))
    assert not answer.matches and not answer.staying and answer.lease is None


def test_a_state_is_stored_once_and_beside_the_same_text_without_one(hub):
    member, text = hub.join(namespace=SPACE), tokens(1, 4 * CHUNK)
    member.store(text)
    assert found(member, text) == (0, None)
    store(member, text, 2 * CHUNK)
    assert found(member, text) == (2 * CHUNK, 1)
    assert len(member.lookup(text, acquire=False).matches) == 1, "all KV is of one run, which has no state"
    assert member.reserve(text[: 2 * CHUNK], Span(CHUNK, 2 * CHUNK), provenance=STATE).lease is None
    assert member.reserve(text).lease is None, "what a state ends needs no copy without it"


def test_a_state_takes_its_bytes_of_the_arena_and_goes_with_its_chunk(make_hub):
    hub = make_hub(16)
    member, free = hub.join(namespace=SPACE), hub.arena.extents.free_bytes
    store(member, tokens(1, 2 * CHUNK), 2 * CHUNK)
    taken = free - hub.arena.extents.free_bytes
    assert taken >= 2 * SPACE.slot_bytes + SPACE.state_bytes
    assert taken < 3 * SPACE.slot_bytes + SPACE.state_bytes
    for seed in range(2, 32):
        member.store(tokens(seed, 2 * CHUNK))
    assert not any(chunk.run.provenance.has_state for chunk in hub.index.chunks())
    hub.state.check_integrity()
    assert hub.arena.extents.free_bytes < SPACE.slot_bytes, "all of the arena is used again"


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_states_come_back_from_a_store(n_ranks, make_hub, tmp_path):
    space = namespace(state_layouts=(STATE_ROWS,), world_size=n_ranks)
    hub, text = make_hub(64, tmp_path / "store"), tokens(1, 4 * CHUNK)

    ranks = [hub.join(namespace=space, rank=rank) for rank in range(n_ranks)]

    def slots(provenance, span):
        reserved = ranks[0].reserve(text[: span.end], span, provenance=provenance)
        for member in ranks:
            member.write(reserved, text)
            if provenance.has_state:
                at = reserved.slots[0].slot + space.state_start(member.rank)
                member.view.slot(at, space.state_bytes)[:] = 7 + member.rank
            member.commit(reserved)

    slots(Provenance(), Span(0, 2 * CHUNK))
    slots(STATE, Span(2 * CHUNK, 3 * CHUNK))
    hub.restart()
    for member in [hub.join(namespace=space, rank=rank) for rank in range(n_ranks)]:
        answer = member.lookup(text, wait_s=5.0)
        assert answer.matches[-1].span.end == 3 * CHUNK
        member.check(answer, text)
        at = answer.state + space.state_start(member.rank)
        assert set(member.view.slot(at, space.state_bytes).tolist()) == {7 + member.rank}


def test_states_are_only_of_recurrent_layers_and_behind_exact_kv(hub):
    text = tokens(1, CHUNK)
    for space, provenance in ((namespace(), STATE), (SPACE, Provenance("blended", 0.1, has_state=True))):
        with pytest.raises(InvalidInput, match="recurrent layers"):
            hub.join(f"of {space.digest}", namespace=space).reserve(text, provenance=provenance)


def test_the_states_of_the_ranks_lie_behind_the_kv_of_all_and_apart():
    space = namespace(state_layouts=(STATE_ROWS, STATE_ROWS), world_size=3)
    starts = [space.state_start(rank) for rank in range(3)]
    assert starts[0] >= space.slot_bytes == 3 * LAYOUT.shard_bytes
    assert all(end - start >= space.state_bytes for start, end in itertools.pairwise(starts))
    assert space.slot_bytes_of(STATE, CHUNK) == starts[-1] + space.state_bytes
    assert space.slot_bytes_of(Provenance(), CHUNK) == space.slot_bytes
