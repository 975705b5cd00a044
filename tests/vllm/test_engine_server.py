"""The OpenAI-compatible server, as a person starts it: in several processes, asked over HTTP, ended by a signal."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from engine_harness import ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = shlex.split("--skip-tokenizer-init --dtype float32 --block-size 32 --enforce-eager --max-model-len 2048")
PATIENCE_S = 450


class Server:
    """``vllm serve`` in a session of its own, so that whatever is left of it can be ended."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = folder / "log"
        host, port = self._address.split(":")
        chosen = {
            "kv_connector": "BlendHubConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"blendhub": {"hub": {"arena_gib": 0.25}, "selector": {"name": "hkvd"}}},
        }
        arguments = ["--model", str(model), "--served-model-name", "tiny", "--host", host, "--port", port]
        arguments += ["--kv-transfer-config", json.dumps(chosen)]
        # The engine must be in a process of its own here, as it is by default.
        environment = {name: value for name, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
        with self._log.open("w") as log:
            # What the command `vllm serve` runs: the command itself cannot start in vLLM's builds for the CPU, which
            # are installed under another name than it looks for.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *arguments, *OPTIONS],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_up(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except urllib.error.URLError:
                time.sleep(0.2)
        pytest.fail(f"the server did not start:\n{self.log[-5000:]}")

    def get(self, path: str, body: dict | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"http://{self._address}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read().decode()

    def ask(self, prompt: list[int], **blendhub: object) -> dict:
        """What BlendHub tells of a completion."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        if blendhub:
            body["kv_transfer_params"] = {"blendhub": blendhub}
        return json.loads(self.get("/v1/completions", body))["kv_transfer_params"]["blendhub"]

    def counters(self) -> Counter[str]:
        """Those of BlendHub on vLLM's metrics endpoint; those with a label as ``name:reason``."""
        found: Counter[str] = Counter()
        for name, labels, count in re.findall(r"^vllm:blendhub_(\w+)_total\{(.*)\} (\S+)$", self.get("/metrics"), re.M):
            reason = re.search(r'reason="(\w+)"', labels)
            found[f"{name}:{reason[1]}" if reason else name] += int(float(count))
        return found

    def arenas(self) -> set[Path]:
        """The shared memory of BlendHub that its processes have mapped."""
        found = set()
        for maps in Path("/proc").glob("[0-9]*/maps"):
            try:
                if os.getsid(int(maps.parent.name)) == self.process.pid:
                    found |= {Path(path) for path in re.findall(r"/dev/shm/blendhub-\S+", maps.read_text())}
            except (ProcessLookupError, FileNotFoundError):
                continue  # a process that ended just now
        return found

    def close(self) -> None:
        """End it, in the end with force; killed at once, its processes would leave vLLM's own shared memory."""
        self.process.terminate()
        until = time.monotonic() + 30
        with suppress(ProcessLookupError):  # none of its processes is left
            while time.monotonic() < until:
                self.process.poll()
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    server = Server(model, tmp_path_factory.mktemp("server"))
    try:
        server.wait_until_up()
        yield server
    finally:
        server.close()


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
    assert "has no option 'ratio'" in server.ask(texts.new(100), ratio=0.5)["reason"]


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
    assert found["saved_tokens"] >= 300 and found["recompute_microseconds"] > 0
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
