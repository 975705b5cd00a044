"""``blendhub warm`` against a small server over a real hub."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain
from pathlib import Path

import pytest

from blendhub.cli import main
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from tests.warm.small_server import BEGIN, LAYOUT, LONGEST, SmallServer

pytestmark = pytest.mark.slow

SYSTEM = "you answer questions about texts"
WORDS = 40


def text(number: int, words: int = WORDS) -> str:
    return " ".join(f"w{number}-{word}" for word in range(words))


def write(file: Path, documents: int, **more: object) -> Path:
    file.write_text("\n".join(json.dumps({"text": text(number), **more}) for number in range(documents)))
    return file


@pytest.fixture(autouse=True)
def no_other_hub(tmp_path, monkeypatch):
    """No hub is where `blendhub serve` listens."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def hub():
    with HubInThread(HubConfig(arena_gib=0.02, metrics="")) as running:
        yield running


@pytest.fixture
def server(hub):
    with SmallServer(hub) as running:
        yield running


@pytest.fixture
def warm(hub, server, tmp_path, capsys):
    system = tmp_path / "system.txt"
    system.write_text(SYSTEM + "\n")

    def run(data: Path, *arguments: str, code: int = 0) -> str:
        shared = ["--server", server.url, "--hub", hub.endpoint, "--system", str(system)]
        assert main(["warm", *shared, "--data", str(data), *arguments]) == code
        return capsys.readouterr().out

    return run


def computed_by(server: SmallServer) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, server.computed))


def test_each_document_is_computed_behind_the_system_text_and_behind_a_neighbour(server, warm, tmp_path):
    said = warm(write(tmp_path / "docs.jsonl", 5))
    assert "5 documents: 10 contexts are computed" in said and "0 contexts were warm" in said
    begin = [BEGIN, *server.ids(f"system: {SYSTEM}")]
    bodies = [prompt[len(begin) + 3 :] for prompt in server.computed if prompt[: len(begin)] == begin]
    documents = [server.ids(text(number)) for number in range(5)]
    alone, behind = bodies[:5], bodies[5:]
    assert sorted(alone) == sorted(documents)
    # All share the same words: before each stands the one before, behind what stands before that one.
    chains = [[one for number in range(last + 1) for one in (*documents[number], 3)][:-1] for last in range(1, 5)]
    assert sorted(behind) == sorted([*chains, [*documents[1], 3, *documents[0]]])


def test_a_second_run_computes_nothing(server, warm, tmp_path):
    data = write(tmp_path / "docs.jsonl", 20)
    warm(data)
    asked, computed = server.asked, len(server.computed)
    assert "0 contexts are computed, 0 tokens" in (said := warm(data)) and "40 contexts were warm" in said
    assert len(server.computed) == computed == 40
    assert server.asked == asked + 1, "the hub is asked; one request tells which hub that is"


def test_without_the_hub_the_server_says_what_is_warm(server, tmp_path, capsys):
    data = write(tmp_path / "docs.jsonl", 6)
    assert main(["warm", "--server", server.url, "--data", str(data)]) == 0
    assert "is asked of the server" in capsys.readouterr().out
    computed = len(server.computed)
    assert main(["warm", "--server", server.url + "/v1/", "--data", str(data)]) == 0
    assert "12 contexts were warm" in capsys.readouterr().out and len(server.computed) == computed


def test_a_killed_command_goes_on_where_it_was(hub, server, warm, tmp_path):
    data = write(tmp_path / "docs.jsonl", 40)
    server.seconds = 0.02
    command = [sys.executable, "-m", "blendhub.cli", "warm", "--server", server.url, "--hub", hub.endpoint]
    system = ["--system", str(tmp_path / "system.txt")]
    with subprocess.Popen([*command, "--data", str(data), *system, "--concurrency", "2"]) as killed:
        until = time.monotonic() + 60
        while len(server.computed) < 30 and time.monotonic() < until:
            time.sleep(0.01)
        killed.kill()
    time.sleep(0.2)  # the last requests are answered
    before = len(server.computed)
    assert 30 <= before < 80
    warm(data)
    assert len(server.computed) == 80 and set(computed_by(server).values()) == {1}, "nothing is computed twice"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_when_what_runs_is_done(server, tmp_path, number, code):
    data = write(tmp_path / "docs.jsonl", 400)
    server.seconds = 0.1
    command = [sys.executable, "-m", "blendhub.cli", "warm", "--server", server.url, "--data", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stopped:
        until = time.monotonic() + 60
        while server.asked < 10 and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(stopped.pid, number)
        out, err = stopped.communicate(timeout=30)
    assert stopped.returncode == code and not err
    assert "Stopped: the same command goes on from here." in out
    assert server.asked < 100 and server.asked == len(server.computed) + 1, "what was begun was computed and stored"


def test_what_is_too_long_stands_in_parts_of_which_a_prompt_holds_two(server, warm, tmp_path):
    file = tmp_path / "docs.jsonl"
    file.write_text(json.dumps({"text": text(1, 1000)}) + "\n" + json.dumps({"text": text(2)}))
    said = warm(file)
    assert f"1 documents are computed in parts: a prompt of {LONGEST} tokens" in said and "--max-model-len" in said
    assert all(len(prompt) < LONGEST for prompt in server.computed)
    stored = set(chain.from_iterable(server.computed))
    assert stored >= set(server.ids(text(1, 1000))), "every word was computed"
    words = server.ids(text(1, 1000))
    ends = sorted({words.index(prompt[-1]) for prompt in server.computed if prompt[-1] in words})
    assert len(ends) > 2 and ends[-1] == 999
    for end in ends[:-1]:
        assert any({words[end], words[end + 1]} <= set(prompt) for prompt in server.computed), "behind the one before"


def test_salts_share_nothing(server, warm, tmp_path):
    data = write(tmp_path / "docs.jsonl", 3)
    warm(data)
    assert "6 contexts are computed" in warm(data, "--cache-salt", "a-tenant")
    assert "6 contexts were warm" in warm(data, "--cache-salt", "a-tenant")


def test_what_did_not_fit_is_said_with_the_key_that_enlarges_it(tmp_path, capsys):
    slots = 24
    gib = slots * LAYOUT.chunk_tokens * 16 / 2**30
    with HubInThread(HubConfig(arena_gib=gib, metrics="")) as hub, SmallServer(hub) as server:
        data = write(tmp_path / "docs.jsonl", 100)
        assert main(["warm", "--server", server.url, "--hub", hub.endpoint, "--data", str(data)]) == 3
    said = capsys.readouterr().out
    assert "of 200 contexts are not stored any more: they did not fit into the arena" in said
    assert "hub.arena_gib enlarges it" in said and "hub.store keeps" in said


def test_blends_are_audited_and_their_agreement_is_said(server, warm, tmp_path):
    said = warm(write(tmp_path / "docs.jsonl", 10), "--verify", "20")
    assert "15 of 20 blends agree with full prefill on the first token: 75%, and with 95% confidence 53% to 89%" in said
    assert len(server.computed) == 20, "what is audited is not stored"


def test_conversations_are_computed_as_they_are(server, warm, tmp_path):
    own = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text(1)}]
    bare = [{"role": "user", "content": text(2)}, {"role": "assistant", "content": text(3)}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": one}) for one in (own, bare)))
    warm(file, "--contexts", "1")
    expected = [own, [{"role": "system", "content": SYSTEM}, *bare]]
    assert sorted(server.computed) == sorted(server.tokenize({"messages": one}) for one in expected)


def test_a_model_without_a_chat_template_gets_plain_text(server, warm, tmp_path):
    server.has_template = False
    file = write(tmp_path / "docs.jsonl", 2)
    file.write_text(file.read_text() + "\n" + json.dumps({"messages": [{"role": "user", "content": "x"}]}))
    said = warm(file, "--contexts", "1", code=3)
    assert sorted(server.computed) == sorted(server.ids(f"{SYSTEM}\n\n{text(number)}") for number in range(2))
    assert "1 documents are left out" in said and "no chat template" in said


def test_the_server_gets_as_much_as_it_sustains(server, warm, tmp_path):
    server.refuses, server.seconds = 3, 0.002
    said = warm(write(tmp_path / "docs.jsonl", 30), "--concurrency", "4")
    assert "60 contexts are computed" in said and server.most_at_once <= 4


def test_progress_is_told_with_the_time_that_is_left(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("blendhub.cli.warm.SAID_EVERY_S", 0.0)
    assert main(["warm", "--server", server.url, "--data", str(write(tmp_path / "docs.jsonl", 6))]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("computing: 1 of 12, ") and lines[-1] == "computing: 12 of 12, 0 min left"


def test_a_server_that_ends_in_the_middle_is_named(server, tmp_path, capsys):
    data = write(tmp_path / "docs.jsonl", 30)
    server.dies_after = 12
    assert main(["warm", "--server", server.url, "--data", str(data), "--concurrency", "2"]) == 2
    said = capsys.readouterr().err
    assert (
        f"no server answers at {server.url}" in said
        and "repeat the command" in said
        and "contexts are computed" in said
    )
    assert "Traceback" not in said


def test_another_hub_is_refused_and_the_default_one_is_not_used(server, tmp_path, capsys):
    data = write(tmp_path / "docs.jsonl", 2)
    with HubInThread(HubConfig(arena_gib=0.01, metrics="")) as other:
        assert main(["warm", "--server", server.url, "--hub", other.endpoint, "--data", str(data)]) == 2
    assert f"the hub at {other.endpoint} is not the one that the server uses" in capsys.readouterr().err


def test_a_server_without_blendhub_is_refused(hub, tmp_path, capsys):
    with SmallServer(hub, has_blendhub=False) as plain:
        assert main(["warm", "--server", plain.url, "--data", str(write(tmp_path / "docs.jsonl", 2))]) == 2
    assert "answers without a report of BlendHub: start vLLM with --kv-transfer-config" in capsys.readouterr().err


def test_what_is_no_server_of_vllm_is_refused(tmp_path, capsys):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *said: object) -> None:
            pass

    data = str(write(tmp_path / "docs.jsonl", 2))
    with HTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_address[1]}"
        assert main(["warm", "--server", url, "--data", data]) == 2
    assert "does not answer /v1/models as vLLM does" in capsys.readouterr().err
    assert main(["warm", "--server", url, "--data", data]) == 2
    assert f"no server answers at {url}" in capsys.readouterr().err
    assert main(["warm", "--server", "localhost", "--data", data]) == 2
    assert "should be an address such as http://localhost:8000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings, said",
    [
        ({}, "name a store in --settings"),
        ({"hub": {"stoer": {}}}, "has no option 'stoer'"),
        ({"hub": {"store": {"name": "shared_directory", "options": {"share": "reused", "path": "/tmp"}}}}, '"all"'),
    ],
)
def test_a_model_without_a_place_that_stays_is_refused(tmp_path, capsys, settings, said):
    data = str(write(tmp_path / "docs.jsonl", 2))
    assert main(["warm", "--model", "m", "--data", data, "--settings", json.dumps(settings)]) == 2
    assert said in capsys.readouterr().err
