"""A client beside a hub whose clock the test moves."""

import threading

import pytest
from blendhub_transports.inproc import InprocTransport
from blendhub_transports.options import InprocOptions
from hub_direct import DirectHub, marks, namespace, tokens
from processes import until

from blendhub.client import HubClient
from blendhub.errors import HubError, InvalidInput, UnknownSession
from blendhub.plan import Span
from blendhub.testing.transports.base import Running

ENDPOINT = "inproc://a-client-test"


@pytest.fixture
def served(hub):
    running = Running(InprocTransport(InprocOptions()), ENDPOINT, hub.service)
    yield hub, running
    running.stop()


def silence(hub: DirectHub, running: Running) -> None:
    """So long that the hub gives up every session."""

    async def pass_time() -> None:
        hub.now += 100
        hub.service.tick()

    running.run(pass_time())


@pytest.mark.parametrize("rank", [0, -1])
def test_a_client_registers_once_again_however_much_was_under_way(served, rank):
    hub, running = served
    with HubClient(ENDPOINT, "inproc") as client:
        client.register("e", namespace(), rank=rank)
        under_way = [client.submit_lookup(tokens(1, 64)) for _ in range(3)]
        for lookup in under_way:
            lookup.result()
        silence(hub, running)
        under_way = [client.submit_lookup(tokens(1, 64)) for _ in range(3)]
        for lookup in under_way:
            with pytest.raises(UnknownSession):
                lookup.result()
        until(lambda: client.is_up)
        assert client.registrations == 2 and client.stats().gauges["sessions"] == 1
        client.lookup(tokens(1, 64))


def test_a_client_is_one_session(served):
    with HubClient(ENDPOINT, "inproc") as client:
        with pytest.raises(InvalidInput, match="world size"):
            client.register("e", namespace(), rank=5)
        client.register("e", namespace())
        with pytest.raises(HubError, match="already"):
            client.register("e", namespace())


def test_a_lease_is_not_given_up_while_it_is_written(served):
    text = tokens(1, 64)
    with HubClient(ENDPOINT, "inproc", timeout=0.3) as client:
        client.register("e", namespace(), rank=0)
        reserved = client.reserve(text, Span(0, 64))
        writing, done = threading.Event(), threading.Event()

        def write() -> None:
            with client.writing(reserved.right):
                writing.set()
                done.wait(10)
                for slot in reserved.slots:
                    client.shard(slot.slot)[: 4 * len(slot.span)] = marks(text, slot.span, 0)

        writer = threading.Thread(target=write)
        writer.start()
        writing.wait(10)
        with pytest.raises(HubError, match="has not ended"):
            client.abort(reserved.right)
        assert client.stats().gauges["write_leases"] == 1
        done.set()
        writer.join()
        client.abort(reserved.right)
        gauges = client.stats().gauges
        assert gauges["write_leases"] == 0 and gauges["arena_free_bytes"] == gauges["arena_bytes"]
