"""Many salts, many sessions and many connections: what has not changed costs nothing."""

import asyncio
import logging

import pytest

from blendhub.client import wire
from blendhub.core.layout import Variant
from blendhub.hub.counters import Counters, Latencies
from blendhub.hub.http.routes import Routes
from blendhub.hub.http.server import MetricsServer
from blendhub.hub.index.namespace_index import NamespaceIndex
from blendhub.hub.reports import ReportTable
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


async def unused(message):
    raise AssertionError(message)


async def metrics_server(stats):
    routes = Routes(stats, Counters(Latencies()), ReportTable(), unused)
    server = MetricsServer(routes.get, routes.delete)
    host, _, port = (await server.start("127.0.0.1:0")).rpartition(":")
    return server, host, int(port)


async def get(host, port, path):
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.parametrize("sent", [b"", b"x", b"GET /metrics HTTP/1.1\r\nx: " + 200_000 * b"y"])
def test_metrics_are_served_beside_many_connections_that_ask_for_nothing(hub, caplog, sent):
    async def serve():
        server, host, port = await metrics_server(hub.service.stats)
        held = []
        for _ in range(100):
            held.append(await asyncio.open_connection(host, port))
            held[-1][1].write(sent)
        await asyncio.sleep(0.1)
        assert len(server._open) <= 16
        answer = await get(host, port, "/metrics")
        assert answer.startswith(b"HTTP/1.1 200 OK") and b"blendhub_chunks" in answer
        for _, writer in held:
            writer.close()
        await server.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(serve())
    assert not caplog.records
