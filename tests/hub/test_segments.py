"""Segments: texts of models with recurrent layers that move whole, each with a map of what it does to the states."""

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendhub.client import wire
from blendhub.contracts import RunKey, StoredRun
from blendhub.core.errors import ArenaFull, InvalidInput, StoreFailed
from blendhub.core.layout import MIN_SEAM_TOKENS, Variant
from blendhub.core.provenance import Provenance, StateMap
from blendhub.core.spans import NOWHERE, Span
from blendhub.hub.stores.store_tier import described
from blendhub.hub.stores.store_writer import RunDescription
from blendhub.outcome.reasons import NotReused, Why
from tests.hub.hub_direct import CHUNK, STATE_ROWS, namespace, tokens
from tests.hub.lookup_oracle import most_covered
from tests.hub.test_states import STATE

SPACE = namespace(state_layouts=(STATE_ROWS,), moves_states=True)
MAP_BYTES = 333
SEAM = MIN_SEAM_TOKENS
A, B, C = (tokens(seed, 100 + 30 * seed) for seed in (1, 2, 3))
QUESTION = tokens(9, 20)


def segment(start, end, kind="exact", **more):
    return Provenance(kind, map=StateMap(Span(start, end), MAP_BYTES), **more)


def prompt_of(*texts):
    return np.concatenate(texts)


def map_bytes(text, rank):
    return np.resize(text.view(np.uint8), MAP_BYTES) ^ np.uint8(rank)


def map_in(member, slot, n_bytes=MAP_BYTES):
    return member.view.slot(slot + member.namespace.map_start(member.rank, n_bytes), n_bytes)


def write(member, reserved, text):
    member.write(reserved, text)
    last = reserved.slots[-1]
    map_in(member, last.slot)[:] = map_bytes(text[reserved.span.start : reserved.span.end], member.rank)


def store_segment(member, text, start, end, kind="exact", **more):
    """Store a segment of a prompt; the others are ranks of the same engine."""
    reserved = member.reserve(text[:end], Span(start, end), provenance=segment(start, end, kind), **more)
    if reserved.lease is not None:
        assert reserved.span == Span(start, end)
        write(member, reserved, text)
        member.commit(reserved)
    return reserved


def look_up(member, prompt, **more):
    """What is found, with the bytes of KV and maps checked."""
    found = member.lookup(prompt, **more)
    member.check(found, prompt)
    assert [one.span for one in found.maps] == [match.span for match in found.matches if match.moved]
    for one in found.maps:
        assert (map_in(member, one.slot) == map_bytes(prompt[one.span.start : one.span.end], member.rank)).all()
    if found.lease is not None:
        member.ask(wire.Release, lease=found.lease)
    return found


def moved(member, prompt, **more):
    return [match.span for match in look_up(member, prompt, **more).matches if match.moved]


@pytest.fixture
def member(hub):
    return hub.join(namespace=SPACE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_segments_that_cover_most_of_a_prompt_are_found_whole(make_hub, data):
    """They overlap each other, some of their chunks are gone, and the best choice is told by brute force."""
    hub = make_hub(400)
    member, trunk, stored = hub.join(namespace=SPACE), tokens(1, 400), {}
    for _ in range(data.draw(st.integers(1, 8))):
        start, length = data.draw(st.integers(0, 380)), data.draw(st.integers(1, 140))
        before, text = (
            tokens(data.draw(st.integers(2, 9)), data.draw(st.integers(0, 70))),
            trunk[start : start + length],
        )
        kind = data.draw(st.sampled_from(["exact", "after_blended"]))
        whole = prompt_of(before, text)
        reserved = store_segment(member, whole, len(before), len(whole), kind)
        assert (reserved.lease is None) == any(np.array_equal(text, other) for other in stored.values())
        if reserved.lease is not None:
            stored[reserved.run] = text
    for run in [run for run in stored if data.draw(st.integers(0, 4)) == 0]:
        del stored[run]
        chunks = [*hub.index.runs[run].chunks.values()]
        hub.state.cache.erase(chunks[data.draw(st.integers(0, 99)) % len(chunks)])
    parts = st.tuples(st.integers(0, 399), st.integers(1, 250)).map(lambda part: trunk[part[0] : sum(part)])
    prompt = prompt_of(*data.draw(st.lists(st.just(trunk) | parts, min_size=1, max_size=3)))
    skipped = data.draw(st.sampled_from([0, 0, 10, 90]))
    found, border = look_up(member, prompt, skip_prefix_n_tokens=skipped), skipped
    for match in found.matches:
        assert match.moved and match.span.start >= border + SEAM
        assert np.array_equal(prompt[match.span.start : match.span.end], stored[match.run])
        border = match.span.end
    assert sum(len(match.span) for match in found.matches) == most_covered(prompt, stored.values(), skipped)
    hub.state.check_integrity()


def test_a_segment_is_of_use_behind_a_seam_and_whole(member):
    store_segment(member, prompt_of(C, A), len(C), len(C) + len(A))
    for n_before in (0, SEAM - 1, SEAM, 1000):
        prompt = prompt_of(tokens(8, n_before), A, QUESTION)
        assert moved(member, prompt) == ([Span(n_before, n_before + len(A))] if n_before >= SEAM else [])
    for n_between in (SEAM - 1, SEAM):
        prompt = prompt_of(C[:SEAM], A, tokens(8, n_between), A)
        assert len(moved(member, prompt)) == (2 if n_between >= SEAM else 1)
    assert not moved(member, prompt_of(C[:SEAM], A[:-1], QUESTION)) and not moved(member, prompt_of(C[:SEAM], A[1:]))


def test_exact_text_leads_to_a_state_and_segments_begin_behind_it(hub, member):
    """Also where the hub has more of the prefix, but without a state, and where a segment begins before the state."""
    system = tokens(5, 2 * CHUNK)
    member.store(prompt_of(system, A))
    member.store(system, Span(CHUNK, 2 * CHUNK), provenance=STATE)
    prompt = prompt_of(system, A, QUESTION)
    found = look_up(member, prompt)
    assert [match.span for match in found.matches] == [Span(0, 64)] and found.matches[0].exact
    assert found.staying == (NotReused(Span(64, 64 + len(A)), Why.NO_STATE),)
    store_segment(member, prompt_of(C, A[SEAM:]), len(C), len(C) + len(A) - SEAM)
    store_segment(member, prompt_of(C, system[-8:], A), len(C), len(C) + 8 + len(A))
    found = look_up(member, prompt)
    assert [match.span for match in found.matches] == [Span(0, 64), Span(64 + SEAM, 64 + len(A))]
    assert found.state is not None and not found.matches[1].exact
    assert found.staying == (NotReused(Span(64, 64 + SEAM), Why.NO_STATE),)


def test_while_a_state_is_on_its_way_segments_begin_behind_what_is_there(make_hub, tmp_path):
    hub = make_hub(64, tmp_path / "store")
    member, system = hub.join(namespace=SPACE), tokens(5, 2 * CHUNK)
    member.store(system[:CHUNK])
    with_state = member.store(system, Span(CHUNK, 2 * CHUNK), provenance=STATE)
    store_segment(member, prompt_of(C, system[SEAM:48]), len(C), len(C) + 48 - SEAM)
    store_segment(member, prompt_of(C, A[SEAM:]), len(C), len(C) + len(A) - SEAM)
    hub.settle()
    (chunk,) = hub.index.runs[with_state.run].chunks.values()
    hub.state.cache.remove(chunk)
    prompt = prompt_of(system, A)
    found = look_up(member, prompt)
    assert [match.span for match in found.matches] == [Span(SEAM, 48), Span(64 + SEAM, len(prompt))]
    assert found.state is None and found.on_the_way == (Span(48, 64),)
    hub.settle()
    found = look_up(member, prompt)
    assert [match.span for match in found.matches] == [Span(0, 32), Span(32, 64), Span(64 + SEAM, len(prompt))]


def test_text_that_stands_elsewhere_without_a_map_is_told_until_it_is_a_segment(member):
    """In one piece where one prompt left it in several runs; and not where it stood, nor as a moved match."""
    first = prompt_of(C, A, QUESTION)
    member.store(first[: 3 * CHUNK])
    member.store(first[: 4 * CHUNK], Span(3 * CHUNK, 4 * CHUNK), provenance=STATE)
    member.store(first, Span(4 * CHUNK, len(first)), provenance=Provenance("after_blended"))
    assert not any(text.code is Why.NO_MAP for text in look_up(member, first).staying), "it stands where it stood"
    prompt = prompt_of(B, C, QUESTION)
    found, at = look_up(member, prompt), Span(len(B), len(B) + len(C))
    assert not found.matches and found.staying == (NotReused(at, Why.NO_MAP),)
    store_segment(member, prompt, at.start + SEAM, at.end)
    found = look_up(member, prompt_of(A, C, B))
    assert [match.span for match in found.matches] == [Span(len(A) + SEAM, len(A) + len(C))]
    assert not any(
        set(range(text.span.start, text.span.end)) & set(range(len(A), len(A) + len(C))) for text in found.staying
    )


def test_an_exact_segment_is_exact_at_its_own_place_too(member):
    text = prompt_of(A, B)
    member.store(text[: 2 * CHUNK])
    store_segment(member, text, 2 * CHUNK, 6 * CHUNK)
    store_segment(member, prompt_of(C, text[7 * CHUNK : 9 * CHUNK]), len(C), len(C) + 2 * CHUNK, "after_blended")
    member.store(text[: 7 * CHUNK], Span(6 * CHUNK, 7 * CHUNK), provenance=STATE)
    found = look_up(member, text)
    assert found.matches[0].exact and found.matches[-1].span.end == 7 * CHUNK and not found.maps
    assert member.reserve(text[: 6 * CHUNK]).lease is None, "its KV is stored once"


def test_kv_behind_blended_text_is_stored_once(member):
    text = prompt_of(A, B)
    plain = Provenance("after_blended", 0.3)
    assert member.store(text, Span(len(A), len(text)), provenance=plain).lease is not None
    assert member.reserve(text, Span(len(A), len(text)), provenance=plain).lease is None
    assert member.reserve(text, provenance=Provenance("blended", 0.3)).lease is None, "no lookup would find it"


def test_a_segment_is_stored_whole_or_not_at_all(make_hub):
    hub = make_hub(8)
    member, free = hub.join(namespace=SPACE), hub.arena.extents.free_bytes
    text = tokens(1, 12 * CHUNK)
    with pytest.raises(ArenaFull, match="the segment of 288 tokens does not fit"):
        member.reserve(text, Span(0, 9 * CHUNK), provenance=segment(0, 9 * CHUNK))
    held = member.store(text[: 4 * CHUNK])
    lease = member.lookup(text[: 4 * CHUNK])
    assert held.lease is not None and not lease.matches
    writing = member.reserve(tokens(2, 4 * CHUNK))
    with pytest.raises(ArenaFull):
        member.reserve(tokens(3, 7 * CHUNK), provenance=segment(0, 7 * CHUNK))
    member.ask(wire.Abort, lease=writing.lease)
    reserved = member.reserve(tokens(4, 5 * CHUNK), provenance=segment(0, 5 * CHUNK))
    write(member, reserved, tokens(4, 5 * CHUNK))
    member.commit(reserved, 4 * CHUNK)
    hub.state.check_integrity()
    member.ask(wire.Abort, lease=reserved.lease)
    assert not moved(member, prompt_of(A, tokens(4, 5 * CHUNK))), "its last chunk and its map were not written"
    assert len(store_segment(member, tokens(4, 5 * CHUNK), 0, 5 * CHUNK).slots) == 5
    assert moved(member, prompt_of(A, tokens(4, 5 * CHUNK))) == [Span(len(A), len(A) + 5 * CHUNK)]
    member.ask(wire.Clear)
    assert hub.arena.extents.free_bytes == free


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_segments_come_back_from_a_store_as_a_whole(n_ranks, make_hub, tmp_path):
    space = msgspec.structs.replace(SPACE, world_size=n_ranks)
    hub, text = make_hub(64, tmp_path / "store"), prompt_of(C, A)
    at, prompt = Span(len(C), len(text)), prompt_of(B, A, QUESTION)
    there = Span(len(B), len(B) + len(A))
    ranks = [hub.join(namespace=space, rank=rank) for rank in range(n_ranks)]
    reserved = ranks[0].reserve(text, at, provenance=segment(at.start, at.end))
    for member in ranks:
        write(member, reserved, text)
        member.commit(reserved)
    hub.restart()
    ranks = [hub.join(namespace=space, rank=rank) for rank in range(n_ranks)]
    found = ranks[0].lookup(prompt)
    assert not found.matches and found.on_the_way == (there,) and not found.staying
    for member in ranks:
        assert moved(member, prompt, wait_s=5.0) == [there]
    first, *_ = sorted(hub.index.chunks(), key=lambda chunk: chunk.span)
    hub.state.cache.remove(first)
    found = ranks[0].lookup(prompt, acquire=False)
    assert not found.matches and found.on_the_way, "a segment that is there in part is not there"
    hub.settle()
    assert moved(ranks[0], prompt) == [there]
    hub.tier.store.discard(first.run.key, first.span)
    hub.restart()
    member = hub.join(namespace=space)
    assert not moved(member, prompt, wait_s=5.0), "what begins later is not the text of its map"
    if n_ranks == 1:
        assert store_segment(member, text, at.start, at.end).lease is not None
        assert moved(member, prompt) == [there]


def test_what_is_cleared_or_of_another_namespace_is_not_found(hub, member):
    text, prompt = prompt_of(C, A), prompt_of(B, A)
    store_segment(member, text, len(C), len(text))
    others = [msgspec.structs.replace(SPACE, weights="w"), namespace(state_layouts=(STATE_ROWS,))]
    for other in others:
        found = hub.join(f"of {other.digest}", namespace=other).lookup(prompt)
        assert not found.matches and not found.staying
    assert not member.lookup(prompt, variant=Variant(cache_salt="s")).matches
    assert moved(member, prompt)
    member.ask(wire.Clear)
    found = member.lookup(prompt)
    assert not found.matches and not found.staying


def test_a_segment_is_refused_that_no_prompt_could_use(hub, member):
    text, whole = prompt_of(C, A), Span(len(C), len(C) + len(A))
    for provenance in (
        segment(*(whole.start, whole.end), "blended"),
        segment(whole.start, whole.end, donates_from=whole.start + 1),
        segment(whole.start, whole.end, donates_from=NOWHERE),
        segment(whole.start, whole.end, has_state=True),
        segment(whole.start, whole.end - 1),
        segment(whole.end, whole.end),
    ):
        with pytest.raises(InvalidInput, match="segment"):
            member.reserve(text, whole, provenance=provenance)
    for other in (namespace(), namespace(state_layouts=(STATE_ROWS,))):
        with pytest.raises(InvalidInput, match="moves_states"):
            hub.join(f"of {other.digest}", namespace=other).reserve(text, whole, provenance=segment(len(C), len(text)))
    about = msgspec.msgpack.encode(RunDescription(SPACE, segment(CHUNK, 3 * CHUNK)))
    for at in (0, 3 * CHUNK):
        chunk = Span(at, at + CHUNK)
        with pytest.raises(StoreFailed, match="lies behind"):
            described(StoredRun(RunKey(SPACE.digest, "x"), text.tobytes(), about, (chunk,)))
