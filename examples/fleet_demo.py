"""``python -m examples.fleet_demo``: what one machine's engine computed is reused by another's.

Each of the two machines, of which this one plays both, has a hub and an engine; Redis and Mooncake serve both.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from blendhub.hub.config import HubConfig, Listen, StoreChoice
from blendhub.hub.embedded import embedded_hub
from examples.demo import Engines, run, start_engine
from harness.servers.mooncake_cluster import Cluster
from harness.servers.redis_server import RedisServer
from harness.waiting import wait_until

ARENAS_GIB = 1.0, 0.15
"""The second has room for little more than one prompt, so that it fetches each prompt."""
FOLLOWED_S = 60.0


@contextmanager
def two_machines(model: Path) -> Iterator[Engines]:
    print("start Redis, Mooncake and two hubs", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster, redis = stack.enter_context(Cluster()), stack.enter_context(RedisServer())
        cluster.start_master()
        cluster.start_node(2**31)
        # Engines, hubs and servers share the cores of one machine.
        deadlines = {"deadline_s": 20.0, "transfer_deadline_s": 20.0}
        store = StoreChoice("mooncake", {"master": cluster.address, "catalogue": redis.url, **deadlines})
        listens = [Listen(endpoint=f"ipc://{folder}/hub-{number}.sock") for number in range(2)]
        hubs = [
            stack.enter_context(
                embedded_hub(HubConfig(listen=(listen,), arena_gib=arena_gib, store=store, metrics=""), "process")
            )
            for listen, arena_gib in zip(listens, ARENAS_GIB, strict=True)
        ]
        clients = [stack.enter_context(hub.connect()) for hub in hubs]
        writer, reader = (stack.enter_context(start_engine(model, {"endpoint": one.endpoint})) for one in listens)

        def has_followed() -> bool:
            here, there = (client.stats().result().gauges for client in clients)
            return not here["store_waiting_chunks"] and 0 < here["chunks"] == there["chunks"]

        yield writer, reader, lambda: wait_until(has_followed, FOLLOWED_S)


if __name__ == "__main__":
    run("examples.fleet_demo", Path("build/fleet-demo"), two_machines)
