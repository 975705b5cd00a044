"""Who is at the other end of a Unix socket, and what of the arena a client that has left still holds."""

import os

import msgspec
import pytest

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import InvalidInput
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub
from blendhub.system.processes import ProcessId
from tests.hub.hub_direct import namespace
from tests.hub.processes import IN_A_CONTAINER, run_python

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
from tests.hub.hub_direct import namespace
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
