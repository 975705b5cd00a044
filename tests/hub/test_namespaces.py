"""Namespaces: nothing is found across them, they are cleared apart, and one that stores nothing takes no memory."""

import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from tests.hub.hub_direct import BASE, CHUNK, namespace, tokens

ANN, BOB = Variant(cache_salt="ann"), Variant(cache_salt="bob")
VARIANTS = [BASE, ANN, BOB, Variant(lora="ann"), Variant("adapter", "ann")]
TEXT = tokens(1, 64)


@pytest.mark.parametrize("stored", VARIANTS)
def test_models_and_variants_share_nothing_and_engines_of_one_model_what_has_the_same_salt(hub, stored):
    member = hub.join("a")
    run = member.store(TEXT, variant=stored).run
    assert hub.join("b").read(TEXT, stored) == 64
    assert hub.join("c", namespace=namespace("another")).read(TEXT, stored) == 0
    for other in set(VARIANTS) - {stored}:
        assert member.lookup(TEXT, variant=other) == wire.Found()
        reserved = member.reserve(tokens(1, 96), Span(64, 96), run=run, variant=other)
        assert reserved.run != run, "a run grew by another namespace's tokens"
        member.ask(wire.Abort, lease=reserved.lease)
    hub.state.check_integrity()


def test_an_engine_registers_without_a_salt(hub):
    with pytest.raises(InvalidInput, match=r"'pepper'.*each of its requests names its own"):
        hub.join(namespace=namespace(cache_salt="pepper"))


def test_a_store_keeps_namespaces_apart(make_hub, tmp_path):
    hub = make_hub(12, tmp_path / "store")
    for seed, variant in enumerate(VARIANTS):
        hub.join(f"engine {seed}").store(tokens(seed, 2 * CHUNK), variant=variant)
    hub.restart()
    member = hub.join()
    for seed, variant in enumerate(VARIANTS):
        for other in VARIANTS:
            assert member.read(tokens(seed, 2 * CHUNK), other) == (2 * CHUNK if other == variant else 0)


def test_clear_drops_one_namespace_or_all_of_the_engine(hub):
    member, stranger = hub.join(), hub.join("b", namespace=namespace("another"))
    for variant in (BASE, ANN, BOB):
        member.store(TEXT, variant=variant)
        stranger.store(TEXT, variant=variant)

    def left(of):
        return [variant for variant in (BASE, ANN, BOB) if of.read(TEXT, variant)]

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
