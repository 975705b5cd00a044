"""What is wrong with memory or a hub: each fault is made, most in a mount namespace, and mended by the advice."""

import asyncio
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from blendhub import PluginHost
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import Request
from blendhub.contracts import Codec, Envelope, Service
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Span
from blendhub.hub.memory.default_size import available_bytes
from blendhub.system.served_vllm import transfer_config
from tests.hub.processes import HubProcess

pytestmark = pytest.mark.slow

MEMORY, HUB = ["--only", "shared-memory"], ["--only", "hub"]
LAYOUT = KVLayout(layers=1, kv_heads=8, key_dim=64, value_dim=64, dtype="float16", chunk_tokens=256)


@pytest.mark.parametrize(
    "options, config, verdict, sentence",
    [
        ("size=64m,huge=advise", "", "warn", "0.06 GiB free, so an arena would have 0.03 GiB only"),
        ("size=64m", "arena_gib = 0.5", "fail", "less than the configured arena of 0.50 GiB"),
        ("size=8g,ro", "", "fail", "cannot create files"),
        ("size=1g", "arena_gib = 0.5", "warn", "no huge pages"),
    ],
    ids=["small", "smaller than the arena", "read-only", "small pages"],
)
def test_shared_memory_is_mounted_as_the_advice_says(check, shm, options, config, verdict, sentence):
    if "[force]" in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text():
        pytest.skip("this kernel forces huge pages on every file system in memory")
    finding = check.mends(check.toml(config), *MEMORY, within=shm(options))
    assert finding["verdict"] == verdict and sentence in finding["sentence"]
    assert finding["command"].startswith("mount -o remount,")


def test_shared_memory_on_a_disk_or_nowhere_is_mounted(check, elsewhere):
    (check.home / "disk").mkdir()
    finding = check.mends(*MEMORY, within=elsewhere(f"mount --bind {check.home}/disk /dev/shm"))
    assert finding["verdict"] == "fail" and "is not in memory, but on" in finding["sentence"]
    devices = check.home / "dev"
    devices.mkdir()
    for name in ("null", "urandom"):
        os.mknod(devices / name, os.stat("/dev/null").st_mode, os.stat(f"/dev/{name}").st_rdev)
    finding = check.mends(*MEMORY, within=elsewhere(f"mount --bind {devices} /dev"))
    assert finding["verdict"] == "fail" and "/dev/shm does not exist" in finding["sentence"]


def test_an_arena_above_what_the_machine_has_fails(check, shm):
    flag = json.dumps(transfer_config({"hub": {"arena_gib": available_bytes() / 2**30 + 9}}))
    finding = check(flag, *MEMORY, within=shm("size=4g,huge=advise")).only("fail")
    assert "the kernel would kill the hub" in finding["sentence"]


def test_a_hub_that_does_not_run_fails_only_if_it_is_named(check):
    assert "an engine embeds one" in check(*HUB).only("ok")["sentence"]
    where = f"ipc://{check.home}/other.sock"
    for arguments in (["--endpoint", where], [check.toml(f'[[listen]]\nendpoint = "{where}"')]):
        finding = check(*HUB, *arguments).only("fail")
        assert f"no hub answers at {where}" in finding["sentence"]
        assert finding["command"] == f"blendhub serve --endpoint {where}"


class Newer(Service):
    """A hub of a later release: its messages have another version."""

    codec = Codec(Request, version=999)

    def handle(self, peer: bytes, request: Envelope) -> Envelope:
        return request


def test_a_hub_of_another_version_fails(check):
    loop, where = asyncio.new_event_loop(), f"ipc://{check.home}/hub.sock"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    transport = PluginHost.discover().create("transport", "zmq")
    server = asyncio.run_coroutine_threadsafe(transport.serve(where, Newer()), loop).result(10)
    try:
        finding = check(*HUB, "--endpoint", where).only("fail")
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert "speaks another version" in finding["sentence"] and finding["command"] == "pip install --upgrade blendhub"


def test_a_running_hub_is_reached_its_arena_mapped_and_its_numbers_read(check, shm):
    hub = HubProcess(check.home)
    try:
        where = ["--endpoint", hub.endpoint]
        assert "its arena of 0.01 GiB can be mapped here" in check(*HUB, *where).only("ok")["sentence"]
        finding = check(*HUB, *where, within=shm("size=8m")).only("fail")
        assert "cannot be used: cannot map the hub's arena" in finding["sentence"]
        with HubClient(hub.endpoint) as client:
            client.register("an-engine", Namespace(model="m", layout=LAYOUT), rank=0)
            for number in range(30):  # each takes half a MiB of the 10
                tokens = np.full(LAYOUT.chunk_tokens, number, np.uint32)
                reserved = client.reserve(tokens, Span(0, len(tokens)))
                client.commit(reserved.right, len(tokens))
        finding = check(*HUB, *where).only("warn")
        assert "chunks were evicted that no store had" in finding["sentence"]
        assert finding["command"] == "blendhub serve --arena-gib 1 --store DIR"
    finally:
        hub.kill()
