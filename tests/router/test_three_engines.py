"""The example's router in front of three real engines, each with its own hub."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from harness.engines.engine import ONE_THREAD, transfer_config
from harness.engines.server import NAME, Server
from harness.engines.tiny_model import make_tiny_model
from harness.ports import free_port
from tests.vllm.conftest import Texts

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def start_server(model, folder, number):
    """An engine with an embedded hub; its server, and the hub's port."""
    port = free_port()
    settings = {"hub": {"arena_gib": 0.05, "metrics": f"127.0.0.1:{port}"}, "audit_share": 0.0}
    server = Server(
        model,
        folder / f"{number}.log",
        transfer_config(settings),
        environment=ONE_THREAD,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    return server, port


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    model = make_tiny_model(folder / "tiny")
    with ExitStack() as stack:
        backends = []
        for number in range(3):  # one after the other: their starts are most of the work
            server, hub = start_server(model, folder, number)
            stack.enter_context(server).wait_until_up()
            backends += ["--backend", f"http://127.0.0.1:{server.port}", f"http://127.0.0.1:{hub}"]
        port = free_port()
        command = [sys.executable, "-m", "examples.router", *backends, "--port", str(port), "--score-timeout-s", "5"]
        process = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))
        stack.callback(process.wait)
        stack.callback(process.terminate)
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{address}/health", timeout=10)
                break
            time.sleep(0.2)
        yield address


def ask(router, prompt):
    """What BlendHub reports of a completion."""
    body = json.dumps({"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{router}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.loads(answer.read())["kv_transfer_params"]["blendhub"]


def test_moved_documents_are_asked_of_the_engine_that_has_them(router):
    texts = Texts(7)
    # Each engine has one of the documents: they share nothing, so that load spreads them.
    documents = [texts.new(400) for _ in range(3)]
    for document in documents:
        ask(router, document)
    time.sleep(2)  # they are stored a moment after the answers
    for document in [*documents, *reversed(documents)]:
        report = ask(router, [*texts.new(30), *document, *texts.new(9)])
        assert report["moved_tokens"] == 400, report
