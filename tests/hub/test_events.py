"""What the hub stores and drops, as events: for engines that ask, and as a stream in vLLM's format."""

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub import Span
from blendhub.client import kv_events, wire
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import HubError
from blendhub.core.layout import Variant
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub
from blendhub.hub.index import event_log
from blendhub.hub.limits import MOST_EVENTS_A_REPLY
from tests.hub.hub_direct import CHUNK, LAYOUT, DirectHub, namespace, tokens


class Follower:
    """What a router knows of a hub that reads the events only."""

    def __init__(self, member):
        self.member, self.since, self.missed = member, 0, False
        self.held: dict[int, kv_events.BlockStored] = {}
        self.follow()

    def follow(self):
        """Read all that is new; returns it."""
        news = []
        while True:
            found = self.member.ask(wire.Events, since=self.since)
            self.since, self.missed = found.next, self.missed or found.missed
            for event in found.events:
                (name,) = event.block_hashes
                if isinstance(event, kv_events.BlockStored):
                    assert name not in self.held, "a name is given twice"
                    self.held[name] = event
                else:
                    del self.held[name]
            news += found.events
            if not found.events:
                return news


def lengths_of_chunks(hub):
    """The lengths of all chunks in the index."""
    return sorted(
        len(chunk.span) for index in hub.state.indexes for chunk in index.chunks() if not chunk.run.origin.blended
    )


def test_chunks_are_announced_with_their_tokens_and_parents(hub):
    member = hub.join()
    follower, text = Follower(member), tokens(1, 2 * CHUNK + 5)
    member.store(text)
    first, second, last = follower.follow()
    assert [event.token_ids for event in (first, second, last)] == [
        text[:CHUNK].tolist(), text[CHUNK : 2 * CHUNK].tolist(), text[2 * CHUNK :].tolist(),
    ]  # fmt: skip
    assert (first.parent_block_hash, [second.parent_block_hash], [last.parent_block_hash]) == (
        None, first.block_hashes, second.block_hashes,
    )  # fmt: skip
    assert [event.block_size for event in (first, last)] == [CHUNK, 5]
    assert first.movable and first.medium == "CPU" and first.lora_name is None and first.extra_keys is None


def test_only_what_can_be_moved_says_so(hub):
    member = hub.join("prefixes", namespace=namespace(matchers=(PluginChoice("prefix"),)))
    follower = Follower(member)
    member.store(tokens(1, CHUNK))
    (event,) = follower.follow()
    assert not event.movable


def test_salts_and_adapters_are_keys_and_blended_text_is_no_news(hub):
    member = hub.join()
    follower = Follower(member)
    member.store(tokens(1, CHUNK), variant=Variant("weights", "salt"))
    member.store(tokens(2, CHUNK), blended=True, generation=1)
    (event,) = follower.follow()
    assert event.lora_name == "weights" and event.extra_keys == [["weights", "salt"]]


def test_an_engine_hears_of_its_own_namespace_only(hub):
    ours, theirs = hub.join("a"), hub.join("b", namespace=namespace("other"))
    follower = Follower(ours)
    theirs.store(tokens(1, CHUNK))
    ours.store(tokens(2, CHUNK))
    assert len(follower.follow()) == 1


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3 * CHUNK)), min_size=1, max_size=12))
def test_who_follows_knows_what_is_stored(prompts):
    hub = DirectHub(HubConfig(), 6, None)  # so small that most is evicted again
    try:
        member = hub.join()
        follower = Follower(member)
        for number, length in prompts:
            text = tokens(number, 3 * CHUNK)[:length]
            member.store(text)
            follower.follow()
            held = sorted(len(event.token_ids) for event in follower.held.values())
            assert held == lengths_of_chunks(hub)
        member.ask(wire.Clear)
        follower.follow()
        assert not follower.held and not follower.missed
    finally:
        hub.close()


def test_what_nobody_asked_for_is_not_kept_and_what_is_kept_is_bounded(hub, monkeypatch):
    member, log = hub.join(), hub.state.indexes.events
    member.store(tokens(1, CHUNK))
    follower = Follower(member)
    assert not follower.held and not log._logged
    monkeypatch.setattr(event_log, "MOST_EVENTS", 4)
    for number in range(2, 9):
        member.store(tokens(number, CHUNK))
    assert len(log._logged) == 4
    follower.follow()
    assert follower.missed and len(follower.held) == 4
    monkeypatch.setattr(event_log, "MOST_EVENT_TOKENS", CHUNK)
    member.store(tokens(10, CHUNK))
    assert len(log._logged) == 1


def test_a_reply_is_bounded_and_the_next_one_goes_on(make_hub):
    hub = make_hub(n_slots=3 * MOST_EVENTS_A_REPLY)
    member = hub.join()
    follower = Follower(member)
    member.store(tokens(1, 2 * MOST_EVENTS_A_REPLY * CHUNK))
    assert len(member.ask(wire.Events, since=0).events) == MOST_EVENTS_A_REPLY
    assert len(follower.follow()) == 2 * MOST_EVENTS_A_REPLY


def test_the_stream_is_in_vllm_s_format(tmp_path):
    events = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM decodes; `make setup` installs it")
    endpoint = f"ipc://{tmp_path}/events"
    config = HubConfig(arena_gib=0.01, metrics="", events=endpoint, events_topic="kv@pod")
    context = zmq.Context()
    with embedded_hub(config) as hub, HubClient(hub.endpoint) as client, context.socket(zmq.SUB) as follower:
        follower.connect(endpoint)
        follower.subscribe("kv@pod@m")
        follower.rcvtimeo = 10_000
        client.register("e", namespace(layout=msgspec.structs.replace(LAYOUT, chunk_tokens=CHUNK)), rank=0)
        for number in range(100):  # a follower hears nothing until its subscription arrived
            reserved = client.reserve(text := tokens(number, CHUNK), Span(0, CHUNK))
            client.commit(reserved.right, CHUNK)
            if follower.poll(100):
                break
        topic, counted, batch = follower.recv_multipart()
        received = msgspec.msgpack.decode(batch, type=events.KVEventBatch)
        assert topic == b"kv@pod@m" and int.from_bytes(counted, "big") >= 0 and received.ts > 1.6e9
        (event,) = received.events
        assert isinstance(event, events.BlockStored) and event.token_ids == text.tolist() and event.medium == "CPU"
        assert msgspec.msgpack.decode(batch)[1][0]["movable"] is True
        client.clear()
        (gone,) = msgspec.msgpack.decode(follower.recv_multipart()[2], type=events.KVEventBatch).events[:1]
        assert isinstance(gone, events.BlockRemoved) and gone.medium == "CPU"
    context.term()


def test_an_address_that_is_taken_is_named(tmp_path):
    config = HubConfig(arena_gib=0.01, metrics="", events="tcp://999.9.9.9:1")
    with pytest.raises(HubError, match=r"cannot publish events at 'tcp://999.9.9.9:1'"):
        embedded_hub(config)
