"""A hub with several endpoints: a client that leaves by one of them ends no session that came by another."""

import time

from blendhub.client.hub_client import HubClient
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import embedded_hub
from tests.hub.hub_direct import namespace, tokens
from tests.hub.mapped import check, store


def test_clients_that_leave_by_one_endpoint_end_no_session_of_another(tmp_path):
    listen = tuple(Listen(endpoint=f"ipc://{tmp_path}/{name}.sock") for name in ("one", "two"))
    config = HubConfig(arena_gib=0.01, metrics="", listen=listen)
    with embedded_hub(config) as hub, HubClient(listen[0].endpoint) as client:
        client.register("stays", namespace(), rank=0)
        store(client, tokens(1, 64))
        for endpoint in (listen[1].endpoint, hub.endpoint, listen[1].endpoint):
            with HubClient(endpoint) as passing:
                passing.stats()
        time.sleep(0.5)  # the hub notices what left
        assert client.stats().gauges["sessions"] == 1
        assert check(client, tokens(1, 64)) == 64 and client.registrations == 1
