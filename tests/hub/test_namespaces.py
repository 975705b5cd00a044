"""Namespaces of one engine: isolation, and memory for what they store alone."""

import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from tests.hub.hub_direct import BASE, CHUNK, namespace, tokens

ANN, BOB = Variant(cache_salt="ann"), Variant(cache_salt="bob")
VARIANTS = [BASE, ANN, BOB, Variant(lora="ann"), Variant("adapter", "ann")]
TEXT = tokens(1, 64)


def test_models_share_nothing(hub):
    one, other = hub.join("a"), hub.join("b", namespace=namespace("another"))
    one.store(TEXT)
    assert not other.lookup(TEXT).matches


@pytest.mark.parametrize("stored", VARIANTS)
def test_variants_of_one_engine_share_nothing(hub, stored):
    member = hub.join()
    run = member.store(TEXT, variant=stored).run
    member.check(member.read(TEXT, stored), TEXT)
    for other in VARIANTS:
        if other == stored:
            continue
        assert member.lookup(TEXT, variant=other) == wire.Found()
        reserved = member.reserve(tokens(1, 96), Span(64, 96), run=run, variant=other)
        assert reserved.run != run, "a run grew by another namespace's tokens"
        member.ask(wire.Abort, lease=reserved.lease)
    hub.state.check_integrity()


def test_engines_of_one_model_share_what_is_stored_with_the_same_salt(hub):
    hub.join("a").store(TEXT, variant=ANN)
    other = hub.join("b")
    acquired = other.read(TEXT, ANN)
    assert len(acquired.pieces) == 2
    other.check(acquired, TEXT)


def test_an_engine_registers_without_a_salt(hub):
    with pytest.raises(InvalidInput, match=r"'pepper'.*each of its requests names its own"):
        hub.join(namespace=namespace(cache_salt="pepper"))


def test_a_store_keeps_namespaces_apart(make_hub, tmp_path):
    hub = make_hub(n_slots=12, store=tmp_path / "store")
    member = hub.join()
    for seed, variant in enumerate(VARIANTS):
        member.store(tokens(seed, 2 * CHUNK), variant=variant)
    hub.restart()
    member = hub.join()
    for seed, variant in enumerate(VARIANTS):
        text = tokens(seed, 2 * CHUNK)
        for other in VARIANTS:
            found = member.lookup(text, variant=other, acquire=False, wait_s=5.0)
            assert bool(found.matches) == (other == variant)
        member.check(member.read(text, variant), text)
    hub.state.check_integrity()


def test_clear_drops_one_namespace_or_all_of_the_engine(hub):
    member, stranger = hub.join(), hub.join("b", namespace=namespace("another"))
    for variant in (BASE, ANN, BOB):
        member.store(TEXT, variant=variant)
        stranger.store(TEXT, variant=variant)

    def left(of):
        return [variant for variant in (BASE, ANN, BOB) if of.lookup(TEXT, variant=variant, acquire=False).matches]

    member.ask(wire.Clear, variant=Variant(cache_salt="never used"))
    member.ask(wire.Clear, variant=ANN)
    assert left(member) == [BASE, BOB]
    member.ask(wire.Clear)
    assert left(member) == [] and left(stranger) == [BASE, ANN, BOB]
    hub.state.check_integrity()


def test_a_salt_that_stores_nothing_leaves_nothing(hub):
    member = hub.join()
    for salt in range(100):
        member.lookup(TEXT, variant=Variant(cache_salt=str(salt)))
    member.store(TEXT, variant=ANN)
    member.ask(wire.Clear)
    hub.service.tick()
    assert not len(hub.state.indexes) and hub.service.stats().namespaces == {}
