"""A hub embedded in another process: in a thread of it, and in a child process that ends with it; and how little a
process that runs only a hub makes of its garbage."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from blendhub.client.arena_view import SHM
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError, HubError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import embedded_hub
from tests.hub.hub_direct import namespace, tokens
from tests.hub.processes import check, run_python, store, until

pytestmark = pytest.mark.slow
TEXT = tokens(1, 96)
SMALL = HubConfig(arena_gib=0.01, metrics="")


@pytest.mark.alone
@pytest.mark.parametrize("where", ["thread", "process"])
def test_an_embedded_hub_serves_this_process_and_others_and_leaves_nothing(where, tmp_path):
    before = set(SHM.iterdir())
    listen = Listen(endpoint=f"ipc://{tmp_path}/others")
    config = HubConfig(arena_gib=0.01, metrics="", listen=(listen,))
    with embedded_hub(config, where) as hub, hub.connect() as inside, HubClient(listen.endpoint) as outside:
        inside.register("e", namespace(), rank=0)
        outside.register("f", namespace(), rank=0)
        store(inside, TEXT)
        assert check(outside, TEXT) == check(inside, TEXT) == 96
        assert [path.name.startswith("blendhub-") for path in set(SHM.iterdir()) - before] == [True]
        # Clients that leave by one endpoint end no session of another.
        for endpoint in (listen.endpoint, hub.endpoint):
            with HubClient(endpoint) as passing:
                passing.stats()
        time.sleep(0.5)  # the hub notices what left
        assert outside.stats().gauges["sessions"] == 2
        assert check(outside, TEXT) == 96 and outside.registrations == 1
    assert set(SHM.iterdir()) == before
    assert not os.path.exists(hub.endpoint.removeprefix("ipc://"))
    with HubClient(hub.endpoint, timeout=0.3) as late, pytest.raises(BlendHubError):
        late.register("g", namespace())
    with pytest.raises(HubError, match="set arena_gib to at most"):
        embedded_hub(HubConfig(arena_gib=2**20), where)


OWNER = """
import sys
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub

hub = embedded_hub(HubConfig(arena_gib=0.01, metrics=""), "process")
print(hub.endpoint, hub.pid, flush=True)
sys.stdin.read()
hub.close()
"""


def test_a_hub_in_a_process_of_its_own_ends_with_its_owner_and_not_with_its_children():
    """vLLM kills an engine's process with all of its children, and so would leave the hub's arena."""
    owner = run_python(OWNER)
    endpoint, hub = owner.stdout.readline().split()
    assert not Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text()
    assert os.getpgid(int(hub)) != os.getpgid(owner.pid), "a Ctrl-C in the owner's terminal leaves the hub to its owner"
    with HubClient(endpoint) as client:
        client.register("e", namespace())
        segment = SHM / client.arena.name.segment
        assert segment.exists()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        until(lambda: not segment.exists())


STRANGE = """
import asyncio
from blendhub import API_VERSION, PluginSpec, hookimpl
from blendhub.contracts import Transport
from blendhub_transports.inproc import InprocTransport
from blendhub_transports.options import TransportOptions

class NeverReady(Transport):
    schemes = ("never://",)

    async def serve(self, endpoint, service):
        await asyncio.sleep(3600)

    def connect(self, endpoint, codec): ...

@hookimpl
def blendhub_transports():
    return [PluginSpec(name="strange", api=API_VERSION, summary="inproc under another name", factory=InprocTransport,
                       options=TransportOptions, capabilities=("one_process",)),
            PluginSpec(name="never", api=API_VERSION, summary="never serves", factory=NeverReady)]
"""


@pytest.mark.alone
def test_a_hub_needs_no_plugin_but_those_that_are_chosen_and_leaves_nothing_where_one_never_starts(site, monkeypatch):
    """A stranger's matcher and transport, and no plugin that is registered by this repository."""
    site.install("ngram", Path("examples/plugin-template/matcher/ngram_matcher.py").read_text(), module="ngram_matcher")
    site.install("strange", STRANGE)
    with embedded_hub(SMALL, "thread", site.host(), PluginChoice("strange")) as hub, hub.connect() as client:
        client.register("e", namespace(matchers=(PluginChoice("ngram"),)), rank=0)
        store(client, TEXT)
        assert check(client, TEXT) == 96
    monkeypatch.setattr("blendhub.hub.embedded.START_TIMEOUT_S", 0.5)
    segments, threads = set(SHM.iterdir()), set(threading.enumerate())
    with pytest.raises(HubError, match=r"the hub did not start in 0\.5 s"):
        embedded_hub(SMALL, "thread", site.host(), PluginChoice("never"))
    until(lambda: set(SHM.iterdir()) == segments and set(threading.enumerate()) <= threads)


# Garbage.

COLLECTIONS = """
import gc
from blendhub.hub.process_tuning import tune_process

looked_at = []

def count(phase, facts):
    if (phase, facts["generation"]) == ("start", 2):
        looked_at.append(len(gc.get_objects()))

gc.callbacks.append(count)
tune_process()
kept = [[] for _ in range(300_000)]
print(len(looked_at) > 1, sum(looked_at) < 400_000, gc.get_freeze_count() > 200_000)
"""


def test_a_hub_s_process_looks_at_each_object_once():
    assert run_python(COLLECTIONS).communicate(timeout=60)[0] == "True True True\n"
