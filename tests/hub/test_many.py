"""Many salts, many sessions and many connections: what has not changed costs nothing."""

from blendhub.client import wire
from blendhub.core.layout import Variant
from blendhub.hub.index.namespace_index import NamespaceIndex
from tests.hub.hub_direct import CHUNK, tokens


def test_statistics_ask_only_the_namespaces_that_have_changed(make_hub, monkeypatch):
    hub = make_hub(n_slots=40)
    member = hub.join()
    for salt in range(40):
        member.store(tokens(salt, CHUNK), variant=Variant(cache_salt=str(salt)))
    assert hub.service.stats().gauges["chunks"] == 40
    asked = []
    nbytes = vars(NamespaceIndex)["nbytes"].fget
    monkeypatch.setattr(NamespaceIndex, "nbytes", property(lambda index: asked.append(index) or nbytes(index)))
    hub.service.stats()
    hub.service.tick()
    assert not asked
    member.store(tokens(50, CHUNK), variant=Variant(cache_salt="1"))
    (sums,) = hub.service.stats().namespaces.values()
    assert len(asked) <= 3
    assert sums.items() >= {"variants": 40, "runs": 40, "chunks": 40, "tokens": 40 * CHUNK}.items()
    member.ask(wire.Clear)
    hub.service.tick()
    assert hub.service.stats().namespaces == {} and hub.service.stats().gauges["matcher_bytes"] == 0
    hub.state.check_integrity()
