"""A match that takes long: its namespace's other requests queue behind it, and nothing else notices."""

import asyncio
import inspect
import threading

import pytest

from blendhub.client import wire
from blendhub.contracts import Envelope
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from tests.hub.hub_direct import CHUNK, namespace, tokens

INLINE = 2 * CHUNK
LONG = tokens(1, 3 * CHUNK)


class SlowNamespace:
    """A namespace whose first long match waits until the test lets it go on, and keeps its matcher locked meanwhile."""

    def __init__(self, hub, member):
        self.hub, self.member = hub, member
        index = hub.state.find_index(hub.state.sessions.get(*self.ids().values(), hub.now), Variant())
        self.matched, self.begun, self.may_end = [], threading.Event(), threading.Event()
        self.matcher = index._matchers[1]
        self.queue = index.queue
        find = self.matcher.match

        def slowly(prompt):
            self.matched.append(prompt)
            if len(prompt) > INLINE:
                with self.matcher._lock:
                    self.begun.set()
                    assert self.may_end.wait(30)
            return find(prompt)

        self.matcher.match = slowly

    def ids(self):
        return {"session": self.member.registered.session, "epoch": self.member.registered.epoch}

    async def ask(self, message, *payload, peer=b"peer"):
        answer = self.hub.service.handle(peer, Envelope(message, payload))
        return (await answer if inspect.isawaitable(answer) else answer).message

    def start(self, prompt=LONG, registered=None, peer=b"peer"):
        ids = {"session": registered.session, "epoch": registered.epoch} if registered else self.ids()
        return asyncio.ensure_future(self.ask(wire.Lookup(**ids), prompt.tobytes(), peer=peer))

    async def until_it_waits(self):
        while not self.begun.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture
def slow(make_hub):
    hub = make_hub(n_slots=8, inline=INLINE)
    member = hub.join()
    member.store(LONG)
    return SlowNamespace(hub, member)


def test_while_a_long_match_holds_its_matcher_the_loop_waits_for_nothing(slow):
    hub, member = slow.hub, slow.member
    other = hub.join("other", namespace=namespace("other"))

    async def meanwhile():
        first = slow.start()
        await slow.until_it_waits()
        ids = slow.ids()
        # Every one of these would stand still if the loop asked the locked matcher.
        await slow.ask(wire.Stats())
        theirs = {"session": other.registered.session, "epoch": other.registered.epoch}
        text = tokens(2, CHUNK)
        reserved = await slow.ask(wire.Reserve(**theirs, span=Span(0, CHUNK)), text.tobytes())
        await slow.ask(wire.Commit(**theirs, lease=reserved.lease, upto=CHUNK))
        found = await slow.ask(wire.Lookup(**theirs), text.tobytes())
        assert [match.span for match in found.matches] == [Span(0, CHUNK)]
        hub.service.tick()
        short = asyncio.ensure_future(slow.ask(wire.Lookup(**ids), LONG[:CHUNK].tobytes()))
        storing = asyncio.ensure_future(slow.ask(wire.Reserve(**ids, span=Span(0, CHUNK)), text.tobytes()))
        await slow.ask(wire.Clear(**ids))
        await asyncio.sleep(0.05)
        assert not first.done() and not short.done() and not storing.done()
        hub.state.check_integrity()
        slow.may_end.set()
        assert not (await first).matches and not (await short).matches, "what they found was cleared meanwhile"
        reserved = await storing
        await slow.ask(wire.Commit(**ids, lease=reserved.lease, upto=CHUNK))
        return (await slow.ask(wire.Lookup(**ids), text.tobytes())).matches

    assert hub.run(meanwhile())
    hub.state.check_integrity()
    assert member.lookup(tokens(2, CHUNK)).matches


def test_what_is_committed_during_a_long_match_is_matchable_after_it(slow):
    async def meanwhile():
        reserved = await slow.ask(wire.Reserve(**slow.ids(), span=Span(0, CHUNK)), tokens(3, CHUNK).tobytes())
        first = slow.start()
        await slow.until_it_waits()
        await slow.ask(wire.Commit(**slow.ids(), lease=reserved.lease, upto=CHUNK))
        slow.may_end.set()
        await first

    slow.hub.run(meanwhile())
    assert slow.member.lookup(tokens(3, CHUNK)).matches
    slow.hub.state.check_integrity()


def test_a_lookup_whose_deadline_passed_while_it_waited_is_not_matched(slow):
    late = tokens(9, 3 * CHUNK)

    async def meanwhile():
        first = slow.start()
        await slow.until_it_waits()
        waiting = slow.start(late)
        await asyncio.sleep(0.01)
        waiting.cancel()  # as a transport does at the deadline
        await asyncio.wait((waiting,))
        slow.may_end.set()
        await first
        while not slow.queue.is_idle:
            await asyncio.sleep(0.001)

    slow.hub.run(meanwhile())
    assert [len(prompt) for prompt in slow.matched] == [len(LONG)]


def test_a_matcher_that_cannot_discard_stops_no_eviction(make_hub, monkeypatch, caplog):
    hub = make_hub(n_slots=4)
    member = hub.join()
    member.store(tokens(1, 4 * CHUNK))
    (index,) = hub.state.indexes

    def fail(*arguments):
        raise KeyError("a fault of the matcher")

    with monkeypatch.context() as trouble:
        trouble.setattr(index._matchers[1], "discard", fail)
        assert len(member.store(tokens(2, 4 * CHUNK)).slots) == 4
    assert "did not reach a matcher: 'a fault of the matcher'" in caplog.text
    assert hub.state.cache.evictions == 4 and index.n_chunks == 4
    member.check(member.read(tokens(2, 4 * CHUNK)), tokens(2, 4 * CHUNK))
    assert not member.lookup(tokens(1, 4 * CHUNK)).matches, "what the matcher still finds is not stored"
