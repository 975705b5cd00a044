"""Who is at the other end of a Unix socket, and what of the arena a client that has left still holds."""

import os
import threading

import msgspec
import pytest
from hub_direct import CHUNK, namespace, tokens
from processes import IN_A_CONTAINER, run_python, until

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub
from blendhub.system.processes import ProcessId

pytestmark = pytest.mark.alone

CONFIG = HubConfig(arena_gib=0.01, metrics="")


def test_a_client_that_claims_to_be_another_process_is_refused(monkeypatch):
    another = msgspec.structs.replace(ProcessId.mine(), pid=os.getppid())
    monkeypatch.setattr(ProcessId, "mine", lambda: another)
    with embedded_hub(CONFIG) as hub, HubClient(hub.endpoint) as client:
        with pytest.raises(InvalidInput, match=f"process {os.getpid()} registers as process {os.getppid()}"):
            client.register("hostile", namespace(), rank=0)
        assert client.stats().gauges["sessions"] == 0
        monkeypatch.undo()
        client.register("honest", namespace(), rank=0)


REGISTERS = """
import sys
from hub_direct import namespace
from blendhub.client.hub_client import HubClient

with HubClient(sys.argv[1]) as client:
    client.register("e", namespace(), rank=0)
    print("registered", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("within", [(), IN_A_CONTAINER], ids=["beside the hub", "in a container"])
def test_a_process_registers_as_itself(within):
    with embedded_hub(CONFIG) as hub:
        process = run_python(REGISTERS, hub.endpoint, within=within)
        output, _ = process.communicate(timeout=60)
        if within and not output:
            pytest.skip("namespaces cannot be made here, they need root and util-linux")
        assert output == "registered\n"


def test_a_client_that_was_closed_during_a_slow_write_gives_its_slots_back_after_it():
    with embedded_hub(CONFIG) as hub, hub.connect() as onlooker:
        free = onlooker.stats().gauges["arena_free_bytes"]
        client = HubClient(hub.endpoint, timeout=0.2)
        client.register("slow", namespace(), rank=0)
        reserved = client.reserve(tokens(1, CHUNK), Span(0, CHUNK))
        writing, may_end = threading.Event(), threading.Event()

        def write_slowly() -> None:
            with client.writing(reserved.right):
                shard = client.shard(reserved.slots[0].slot)
                writing.set()
                may_end.wait(30)
                shard[:] = 7

        writer = threading.Thread(target=write_slowly)
        writer.start()
        writing.wait(30)
        client.close()
        until(lambda: onlooker.stats().gauges["arena_quarantined_bytes"] > 0)
        may_end.set()
        writer.join()
        # The hub looks again at each of its ticks.
        until(lambda: onlooker.stats().gauges["arena_free_bytes"] == free)
