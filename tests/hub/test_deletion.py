"""What requests with a salt stored is deleted: from index, arena and store, and nothing of any other salt.

That it is not read, and not published, by whoever reads or writes it meanwhile is in test_machine.py.
"""

import asyncio
import threading

import pytest

from blendhub.client import wire
from blendhub.core.errors import InvalidInput, StoreFailed
from blendhub.core.layout import Variant
from blendhub.hub.stores import store_tier
from tests.hub.hub_direct import CHUNK, HOST, tokens

A, B = Variant(cache_salt="a"), Variant(cache_salt="b")
DOCUMENT = tokens(1, 4 * CHUNK)


def forget(hub, salt="a"):
    hub.ask(wire.Forget(salt))
    hub.state.check_integrity()


def test_a_salt_is_deleted_whole_and_no_other_and_the_store_has_none_of_it_after_a_restart(make_hub, tmp_path):
    hub = make_hub(6, tmp_path / "store")
    member, others, adapter = hub.join(), tokens(2, 3 * CHUNK), Variant("an adapter", "a")
    member.store(DOCUMENT, variant=A)
    hub.settle()
    member.store(DOCUMENT[:CHUNK], variant=adapter)
    member.store(others, variant=B)  # pushes some of it out of the arena
    hub.settle()
    forget(hub)
    assert member.read(DOCUMENT, A) == member.read(DOCUMENT, adapter) == 0
    hub.restart()
    reader = hub.join()
    assert reader.read(DOCUMENT, A) == 0 and reader.read(others, B) == len(others)
    forget(hub, "b")
    forget(hub, "b")  # deleting what is not there is fine
    assert not list((tmp_path / "store").rglob("*.kv"))
    with pytest.raises(InvalidInput, match="name a cache salt"):
        forget(hub, "")


class SlowStore:
    """A disk store whose saves wait until they may go on."""

    def __init__(self, path):
        self.may_save = threading.Event()
        self.fails = False
        self._store = HOST.create("store", "disk", {"path": str(path), "capacity_gib": 0.001})

    def __getattr__(self, name):
        return getattr(self._store, name)

    def save_chunks(self, *chunks):
        assert self.may_save.wait(10)
        return self._store.save_chunks(*chunks)

    def discard(self, *chunk):
        if self.fails:
            raise StoreFailed("the disk is away; mount it")
        self._store.discard(*chunk)


@pytest.mark.parametrize("saved_first", ["a", "b"])
def test_what_waits_to_be_saved_or_is_being_saved_is_deleted(make_hub, tmp_path, saved_first, monkeypatch):
    monkeypatch.setattr(store_tier, "WAIT_FOR_STORE_S", 0.02)
    store = SlowStore(tmp_path / "store")
    hub = make_hub(64, lambda: store)
    member = hub.join()
    for salt in (saved_first, *({"a", "b"} - {saved_first})):
        member.store(tokens(5, CHUNK), variant=Variant(cache_salt=salt))

    async def go_on():
        deleting = asyncio.ensure_future(hub.answer(wire.Forget("a")))
        await asyncio.sleep(0.05)
        assert hub.tier.writer.waiting == (2 if saved_first == "a" else 1), "only what is being saved stays"
        store.may_save.set()
        await deleting

    hub.run(go_on())
    hub.settle()
    assert len(list(store.runs())) == 1 and member.read(tokens(5, CHUNK), B) == CHUNK
    # A store that fails is an error, and the next deletion finishes.
    store.fails = True
    with pytest.raises(StoreFailed, match="mount it"):
        forget(hub, "b")
    store.fails = False
    forget(hub, "b")
    assert not list(store.runs())
