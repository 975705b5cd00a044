"""``python -m examples.fleet_demo``: what one machine's engine computed is reused by another's.

Each of the two machines is a network namespace with a hub and an engine, or an address of this machine where
namespaces are not permitted. Redis and Mooncake run on a third.
"""

import contextlib
import tempfile
from pathlib import Path

from blendhub.client.hub_client import HubClient
from examples.demo import command, experiment
from examples.demo.workload import Workload
from harness.servers.mooncake_cluster import Cluster, wait_until
from harness.servers.network import machines
from harness.servers.redis_server import RedisServer
from harness.servers.served_hub import START_S, ServedHub, has_followed

NODE_BYTES = 2**31
FIRST_GIB = 1.0
SECOND_GIB = 0.15
"""Room for little more than one prompt, so that the second machine fetches each prompt."""
FOLLOWED_S = 60.0
PATIENT = {"deadline_s": "20", "transfer_deadline_s": "20"}
"""Two engines, two hubs and all servers share the cores of one machine."""


def _measure(workload: Workload) -> list[experiment.Measured]:
    with contextlib.ExitStack() as closing:
        print("start Redis, Mooncake and two hubs", flush=True)
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        first, second, servers = closing.enter_context(machines(3))
        cluster = closing.enter_context(Cluster(servers))
        cluster.start_master()
        cluster.start_node(NODE_BYTES)
        redis = closing.enter_context(RedisServer(machine=servers))
        fleet = {"master": cluster.address, "catalogue": redis.url, **PATIENT}
        hubs = [
            closing.enter_context(contextlib.closing(ServedHub(folder, machine.address, room, fleet, machine)))
            for machine, room in ((first, FIRST_GIB), (second, SECOND_GIB))
        ]
        clients = [closing.enter_context(HubClient(hub.endpoint)) for hub in hubs]
        for client in clients:
            wait_until(client.stats, START_S)
        engines = [
            closing.enter_context(command.start_engine({"endpoint": hub.endpoint}, machine.arrange()))
            for hub, machine in zip(hubs, (first, second), strict=True)
        ]
        experiment.show(engines[0], workload)
        wait_until(lambda: has_followed(*clients), FOLLOWED_S)
        return experiment.measure(engines[1], workload)


if __name__ == "__main__":
    command.run("examples.fleet_demo", "Serve what another machine has seen.", Path("build/fleet-demo"), _measure)
