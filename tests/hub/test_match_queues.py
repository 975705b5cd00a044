"""A match that takes long: its namespace's other requests queue behind it, and nothing else notices."""

import asyncio
import threading

import pytest

from blendhub.client import wire
from blendhub.core.errors import LeaseError
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from blendhub.hub.index.matchers import Use
from tests.hub.hub_direct import CHUNK, namespace, tokens

INLINE = 2 * CHUNK
LONG = tokens(1, 3 * CHUNK)


class SlowNamespace:
    """A namespace whose first long match waits until the test lets it go on, and keeps its matcher locked meanwhile."""

    def __init__(self, hub, member):
        self.hub, self.member = hub, member
        self.queue, matcher = hub.index.queue, hub.index.matchers.by_use[Use.REUSE][1]
        self.matched, self.begun, self.may_end = [], threading.Event(), threading.Event()
        find = matcher.match

        def slowly(prompt):
            self.matched.append(len(prompt))
            if len(prompt) > INLINE:
                with matcher._lock:
                    self.begun.set()
                    assert self.may_end.wait(30)
            return find(prompt)

        matcher.match = slowly

    def begin(self, kind, text=None, by=None, **fields):
        message = kind(**(by or self.member).ids, **fields)
        return asyncio.ensure_future(self.hub.answer(message, [] if text is None else [text.tobytes()]))

    async def ask(self, *request, **fields):
        return (await self.begin(*request, **fields)).message

    async def begin_long(self):
        lookup = self.begin(wire.Lookup, LONG)
        while not self.begun.is_set():
            await asyncio.sleep(0.001)
        return lookup


@pytest.fixture
def slow(make_hub):
    hub = make_hub(8, inline=INLINE)
    member = hub.join()
    member.store(LONG)
    return SlowNamespace(hub, member)


def test_while_a_long_match_holds_its_matcher_the_loop_waits_for_nothing(slow):
    hub, text = slow.hub, tokens(2, CHUNK)
    other = hub.join("other", namespace=namespace("other"))

    async def meanwhile():
        early = await slow.ask(wire.Reserve, tokens(3, CHUNK), span=Span(0, CHUNK))
        first = await slow.begin_long()
        # Every one of these would stand still if the loop asked the locked matcher.
        await hub.answer(wire.Stats())
        reserved = await slow.ask(wire.Reserve, text, other, span=Span(0, CHUNK))
        await slow.ask(wire.Commit, by=other, lease=reserved.lease, upto=CHUNK)
        found = await slow.ask(wire.Lookup, text, other)
        assert [match.span for match in found.matches] == [Span(0, CHUNK)]
        hub.service.tick()
        short = slow.begin(wire.Lookup, LONG[:CHUNK])
        storing = slow.begin(wire.Reserve, text, span=Span(0, CHUNK))
        late = slow.begin(wire.Lookup, tokens(9, 4 * CHUNK))
        await slow.ask(wire.Clear)
        with pytest.raises(LeaseError):
            await slow.ask(wire.Commit, lease=early.lease, upto=CHUNK)
        await asyncio.sleep(0.05)
        assert not first.done() and not short.done() and not storing.done()
        late.cancel()  # as a transport does at the deadline
        await asyncio.wait((late,))
        hub.state.check_integrity()
        slow.may_end.set()
        for lookup in (first, short):
            assert not (await lookup).message.matches, "what it found was cleared meanwhile"
        await slow.ask(wire.Commit, lease=(await storing).message.lease, upto=CHUNK)

    hub.run(meanwhile())
    assert 4 * CHUNK not in slow.matched, "nobody waits for it any more"
    assert slow.member.lookup(text).matches and not slow.member.lookup(tokens(3, CHUNK)).matches


def test_a_matcher_that_does_not_tell_its_memory_leaves_the_hubs_figures_as_they_were(hub, monkeypatch, caplog):
    hub.join().store(tokens(1, 4 * CHUNK))
    before = hub.ask(wire.Stats()).gauges["matcher_bytes"]

    def fail(matcher):
        raise KeyError("a fault of the matcher")

    monkeypatch.setattr(type(hub.index.matchers.by_use[Use.REUSE][1]), "nbytes", property(fail))
    hub.join("other").store(tokens(2, CHUNK), variant=Variant(cache_salt="salt"))
    gauges = hub.ask(wire.Stats()).gauges
    assert gauges["matcher_bytes"] == before > 0 and gauges["chunks"] == 5
    assert caplog.text.count("does not tell its memory: 'a fault of the matcher'") == 1


def test_a_matcher_that_cannot_discard_stops_no_eviction(make_hub, monkeypatch, caplog):
    hub = make_hub(4)
    member = hub.join()
    member.store(tokens(1, 4 * CHUNK))

    def fail(*arguments):
        raise KeyError("a fault of the matcher")

    with monkeypatch.context() as trouble:
        trouble.setattr(hub.index.matchers.by_use[Use.REUSE][1], "discard", fail)
        assert len(member.store(tokens(2, 4 * CHUNK)).slots) == 4
    assert "did not reach a matcher: 'a fault of the matcher'" in caplog.text
    assert member.read(tokens(2, 4 * CHUNK)) == 4 * CHUNK
    assert not member.lookup(tokens(1, 4 * CHUNK)).matches, "what the matcher still finds is not stored"
    member.ask(wire.Clear)
    hub.service.tick()  # drops the index, and with it the matcher
