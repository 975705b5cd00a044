"""The OpenAI-compatible server, as a person starts it: in several processes, asked over HTTP, ended by a signal."""

import json
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from blendhub.client.hub_client import HubClient
from harness.engines import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def connector(endpoint: str) -> dict:
    """``endpoint``: where the embedded hub listens besides."""
    hub = {"arena_gib": 0.25, "listen": [{"endpoint": endpoint}]}
    return {
        "kv_connector": "BlendHubConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"blendhub": {"hub": hub, "selector": {"name": "hkvd"}}},
    }


class AskedServer(Server):
    """``vllm serve``, and what its clients ask."""

    hub: str

    def get(self, path: str, body: dict | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        address = f"http://127.0.0.1:{self.port}{path}"
        asked = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read().decode()

    def ask(self, prompt: list[int], **blendhub: object) -> dict:
        """What BlendHub tells of a completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if blendhub:
            body["kv_transfer_params"] = {"blendhub": blendhub}
        return json.loads(self.get("/v1/completions", body))["kv_transfer_params"]["blendhub"]

    def counters(self) -> Counter[str]:
        """BlendHub's counters on vLLM's metrics endpoint; those with a label as ``name:reason``."""
        found: Counter[str] = Counter()
        for name, labels, count in re.findall(r"^vllm:blendhub_(\w+)_total\{(.*)\} (\S+)$", self.get("/metrics"), re.M):
            reason = re.search(r'reason="(\w+)"', labels)
            found[f"{name}:{reason[1]}" if reason else name] += int(float(count))
        return found

    def arenas(self) -> set[Path]:
        """The shared memory of BlendHub that its processes have mapped."""
        found = set()
        for pid in self.processes():
            with suppress(FileNotFoundError):  # it ended just now
                found |= set(map(Path, re.findall(r"/dev/shm/blendhub-\S+", Path(f"/proc/{pid}/maps").read_text())))
        return found


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    endpoint = f"ipc://{folder}/hub.sock"
    with AskedServer(
        model, folder / "log", connector(endpoint), skip_tokenizer_init=True, max_model_len=2048
    ) as server:
        server.wait_until_up()
        server.hub = endpoint
        yield server


def test_a_response_tells_what_was_reused(server, texts):
    document = texts.new(400)
    first = server.ask(document)
    assert first == {
        "engine_tokens": 0,
        "exact_tokens": 0,
        "settled_tokens": 0,
        "moved_tokens": 0,
        "recomputed_tokens": 0,
        "hole_tokens": 0,
        "reason": "nothing of this prompt is stored",
    }
    assert server.ask([*texts.new(50), *document, *texts.new(9)]) == {
        "engine_tokens": 0,
        "exact_tokens": 0,
        "settled_tokens": 0,
        "moved_tokens": 400,
        "recomputed_tokens": 60,
        "hole_tokens": 50,
        "approximate_from": 50,
    }


def test_every_request_may_say_what_it_wants(server, texts):
    document, unstored = texts.new(400), texts.new(200)
    server.ask(document)
    server.ask(unstored, store=False)
    half = server.ask([*texts.new(40), *document, *texts.new(9)], recompute_ratio=0.5, explain=True)
    assert half["moved_tokens"] == 400 and half["recomputed_tokens"] == 200
    assert half["spans"]["holes"] == [[0, 40]] and half["spans"]["moved"] == [[40, 440]]
    for asked in ({"mode": "exact"}, {"mode": "off"}):
        report = server.ask([*texts.new(41), *document, *texts.new(9)], **asked)
        assert report["moved_tokens"] == 0 and "reason" in report
    assert server.ask([*texts.new(42), *unstored, *texts.new(9)])["moved_tokens"] == 0
    assert "unknown field `ratio`" in server.ask(texts.new(100), ratio=0.5)["reason"]


def test_what_a_tenant_stored_is_deleted_by_its_salt(server, texts):
    server.ask(texts.new(400))
    tenant = {"model": "tiny", "prompt": texts.new(400), "max_tokens": 1, "cache_salt": "tenant"}
    with HubClient(server.hub) as client:
        before = until_stored(client, lambda variants: variants > 0)
        server.get("/v1/completions", tenant)
        assert until_stored(client, lambda variants: variants > before) == before + 1
        client.forget("tenant")
        assert until_stored(client, lambda variants: variants == before) == before


def until_stored(client: HubClient, is_reached: Callable[[float], bool]) -> float:
    """How many salts have stored something, no salt among them; the hub hears of it a moment after the response."""
    until = time.monotonic() + 30
    while True:
        variants = sum(sums["variants"] for sums in client.stats().namespaces.values())
        if is_reached(variants) or time.monotonic() > until:
            return variants
        time.sleep(0.1)


def test_counters_are_on_the_metrics_endpoint(server, texts):
    before = server.counters()
    document = texts.new(300)
    server.ask(document)
    server.ask([*texts.new(70), *document, *texts.new(9)], recompute_ratio=0.25)
    server.ask([*texts.new(70), *document, *texts.new(9)], recompute_ratio=0.25, store=False)
    server.ask([*document, *texts.new(100)], mode="off")
    expected = Counter(
        {
            "requests_blended": 2,
            "requests_with_holes": 2,
            "tokens_moved": 600,
            "tokens_recomputed": 150,
            "tokens_in_holes": 140,
            "requests_without_reuse:nothing_stored": 1,
            "requests_without_reuse:off": 1,
        }
    )
    found: Counter[str] = Counter()
    until = time.monotonic() + 30
    while not found >= expected and time.monotonic() < until:  # they come a moment after the responses
        time.sleep(0.2)
        found = server.counters() - before
    assert {name: found[name] for name in expected} == expected
    assert found["saved_tokens"] >= 300
    assert not found["loads_failed"]


def test_a_signal_ends_it_and_no_shared_memory_is_left(server):
    """The last test of this server."""
    arenas = server.arenas()
    assert len(arenas) == 1
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log[-3000:]
    until = time.monotonic() + 10
    while any(arena.exists() for arena in arenas) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [arena for arena in arenas if arena.exists()]
