"""Hubs and clients in real processes, some of which die; and a hub embedded in a process: in a thread of it, or in a
child that ends with it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from blendhub.client.arena_view import SHM
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError, HubError
from blendhub.core.plugin_choice import PluginChoice
from blendhub.hub.config import HubConfig, Listen
from blendhub.hub.embedded import embedded_hub
from tests.hub.hub_direct import namespace, tokens
from tests.hub.processes import IN_A_CONTAINER, HubProcess, check, python_of, run_python, store, until
from tests.namespaces import skip_unless_permitted

pytestmark = pytest.mark.slow
TEMPLATE = Path("examples/plugin-template")
TEXT = tokens(1, 96)
SMALL = HubConfig(arena_gib=0.01, metrics="")

VICTIM = """
import os, signal, sys, time
from tests.hub.hub_direct import namespace, tokens
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError
from blendhub.core.spans import Span

client = HubClient(sys.argv[1], timeout=1.0)
client.register("victim", namespace(), rank=0)
if sys.argv[2] == "read":
    assert client.lookup(tokens(2, 96)).result().lease is not None
else:
    reserved = client.reserve(tokens(1, 96), Span(0, 96)).result()
    client.shard(reserved.slots[0].slot)[:] = 7
child = os.fork() if sys.argv[2] == "fork" else -1
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
try:
    with client.writing(reserved.right):
        for slot in reserved.slots:
            client.shard(slot.slot)[:] = 0xEE
    print("wrote", flush=True)
except BlendHubError as error:
    print(type(error).__name__, flush=True)
sys.stdin.read()
"""


def victim_of(hub: HubProcess, does: str, within: Sequence[str] = ()) -> tuple[subprocess.Popen[str], int]:
    """The process, and its child if it forks."""
    victim = run_python(VICTIM, hub.endpoint, does, within=within)
    assert victim.stdout
    return victim, int(victim.stdout.readline())


def test_a_client_killed_while_it_reads_or_writes_leaves_nothing_when_its_last_child_has_ended(hub_process):
    """Its connection may end before the kernel tells of its death, and a child may still write."""
    hub = hub_process()
    with HubClient(hub.endpoint) as client:
        client.register("survivor", namespace(), rank=0)
        store(client, tokens(2, 96))
        free = client.stats().result().gauges["arena_free_bytes"]
        for does in ("read", "write", "fork"):
            victim, child = victim_of(hub, does)
            assert client.stats().result().gauges[f"{'read' if does == 'read' else 'write'}_leases"] == 1
            victim.kill()
            victim.wait()
            until(lambda: client.stats().result().gauges["sessions"] == 1)
            if does == "fork":
                time.sleep(1.0)
                assert client.stats().result().gauges["arena_quarantined_bytes"] > 0, "the child still maps the arena"
                os.kill(child, signal.SIGKILL)
            until(lambda: client.stats().result().gauges["arena_free_bytes"] == free)
            gauges = client.stats().result().gauges
            assert gauges["arena_quarantined_bytes"] == gauges["write_leases"] == gauges["read_leases"] == 0
        assert check(client, tokens(1, 96)) == 0 and check(client, tokens(2, 96)) == 96


@pytest.mark.parametrize(
    "within, trouble",
    [((), "the hub was restarted"), (IN_A_CONTAINER, "its session ended")],
    ids=["beside the hub", "in a container"],
)
def test_a_process_that_stood_still_keeps_its_slots_and_writes_nothing_when_it_wakes(hub_process, within, trouble):
    """It may wake and write at any time, so its slots are not reused before it has heard of the end, or is dead."""
    skip_unless_permitted(within)
    hub = hub_process(silence_s=1.0, arena_gib=4 * namespace().slot_bytes / 2**30)
    with HubClient(hub.endpoint) as client:
        late, _ = victim_of(hub, "write", within)
        os.kill(python_of(late), signal.SIGSTOP)
        if trouble == "its session ended":
            free = client.stats().result().gauges["arena_free_bytes"]
            until(lambda: client.stats().result().gauges["sessions"] == 0)
            gauges = client.stats().result().gauges
            assert gauges["arena_quarantined_bytes"] > 0 == gauges["write_leases"]
            assert gauges["arena_free_bytes"] == free
        else:
            hub.kill()
            hub.start()
        os.kill(python_of(late), signal.SIGCONT)
        with HubClient(hub.endpoint) as other:
            until(lambda: other.stats().result().gauges["sessions"] == 1)
            until(
                lambda: (
                    other.stats().result().gauges["arena_free_bytes"] == other.stats().result().gauges["arena_bytes"]
                )
            )
            other.register("other", namespace(), rank=0)
            # As many as there is room for, so that the slots of the late one are among them.
            for seed in range(2, 6):
                store(other, tokens(seed, 96))
            assert late.stdin and late.stdout
            late.stdin.write("\n")
            late.stdin.flush()
            assert late.stdout.readline() == "LeaseError\n"
            assert sum(check(other, tokens(seed, 96)) for seed in range(2, 6)) > 0
        late.kill()
        late.wait()


# Embedded.


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
                passing.stats().result()
        time.sleep(0.5)  # the hub notices what left
        assert outside.stats().result().gauges["sessions"] == 2
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


def test_a_hub_needs_no_plugin_but_those_that_are_chosen(site):
    """The template's matcher and transport, and no plugin that is registered by this repository."""
    for kind, name in (("matcher", "ngram"), ("transport", "unix")):
        site.install(name, (TEMPLATE / kind / f"{name}_{kind}.py").read_text(), module=f"{name}_{kind}")
    with embedded_hub(SMALL, "thread", site.host(), PluginChoice("unix")) as hub, hub.connect() as client:
        client.register("e", namespace(matchers=(PluginChoice("ngram"),)), rank=0)
        store(client, TEXT)
        assert check(client, TEXT) == 96


NEVER_READY = """
import asyncio
from blendhub import API_VERSION, PluginSpec, hookimpl
from blendhub.contracts import Transport

class NeverReady(Transport):
    schemes = ("never://",)

    async def serve(self, endpoint, service):
        await asyncio.sleep(3600)

    def connect(self, endpoint, codec): ...

@hookimpl
def blendhub_transports():
    return [PluginSpec(name="never", api=API_VERSION, summary="never serves", factory=NeverReady)]
"""


@pytest.mark.alone
def test_a_hub_that_does_not_start_in_time_leaves_nothing(site, monkeypatch):
    site.install("never-ready", NEVER_READY)
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
