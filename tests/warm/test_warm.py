"""``blendhub warm`` against a small server over a real hub."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from blendhub.cli import main
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from tests.warm.small_server import SmallServer

pytestmark = pytest.mark.slow

SYSTEM = {"role": "system", "content": "you answer questions about texts"}


def text(number: int, words: int = 40) -> str:
    return " ".join(f"w{number}-{word}" for word in range(words))


def write(file: Path, documents: int) -> Path:
    file.write_text("\n".join(json.dumps({"text": text(number)}) for number in range(documents)))
    return file


@pytest.fixture
def server():
    with HubInThread(HubConfig(arena_gib=0.02, metrics="")) as hub, SmallServer(hub) as running:
        yield running


@pytest.fixture
def warm(server, tmp_path, capsys):
    (tmp_path / "system").write_text(SYSTEM["content"] + "\n")

    def run(data: Path, *arguments: str, code: int = 0) -> str:
        given = ["--server", server.url, "--system", str(tmp_path / "system"), "--data", str(data)]
        assert main(["warm", *given, *arguments]) == code
        return capsys.readouterr().out

    return run


def test_each_document_is_computed_alone_and_in_the_company_of_earlier_ones(server, warm, tmp_path):
    assert "12 documents: 24 contexts are computed" in warm(write(tmp_path / "docs.jsonl", 12))
    assert all(prompt[0] == SYSTEM for prompt in server.computed)
    contents = [prompt[1]["content"] for prompt in server.computed]
    documents = [text(number) for number in range(12)]
    assert sorted(contents[:12]) == sorted(documents)
    companies = [[documents.index(part) for part in content.split("\n\n")] for content in contents[12:]]
    assert sorted(company[-1] for company in companies) == list(range(12))
    for company in companies:
        assert len(company) > 1 and len(set(company)) == len(company), "no document stands twice"
        assert company == [1, 0] or company == sorted(company), "before a document stand earlier ones"
    assert max(map(len, companies)) > 2
    longer = write(tmp_path / "longer.jsonl", 14)
    assert "4 contexts are computed" in warm(longer), "added documents change no other's company"


def test_a_stopped_command_goes_on_where_it_was(server, warm, tmp_path):
    data = write(tmp_path / "docs.jsonl", 40)
    server.seconds = 0.02
    # A child of `nohup make test &` inherits that SIGINT is ignored.
    restored = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import blendhub.cli.__main__"
    command = [sys.executable, "-c", restored, "warm", "--server", server.url, "--data", str(data)]
    command += ["--system", str(tmp_path / "system"), "--concurrency", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stopped:
        until = time.monotonic() + 60
        while len(server.computed) < 30 and time.monotonic() < until:
            time.sleep(0.01)
        stopped.send_signal(signal.SIGINT)
        said, _ = stopped.communicate(timeout=30)
    assert stopped.returncode == 130 and "Stopped: the same command goes on from here." in said
    assert 30 <= len(server.computed) < 80 and server.most_at_once <= 2
    warm(data)
    computed = Counter(map(str, server.computed))
    assert len(server.computed) == 80 and set(computed.values()) == {1}, "nothing is computed twice"
    assert "0 contexts are computed, 0 tokens; 80 contexts were stored" in warm(data)


def test_salts_share_nothing(server, warm, tmp_path):
    data = write(tmp_path / "docs.jsonl", 3)
    warm(data)
    assert "6 contexts are computed" in warm(data, "--cache-salt", "a-tenant")
    assert "6 contexts were stored" in warm(data, "--cache-salt", "a-tenant")


def test_what_did_not_fit_is_said_with_the_key_that_enlarges_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("blendhub.cli.warm.STORED_WITHIN_S", 0.0)
    with HubInThread(HubConfig(arena_gib=24 * 1024 / 2**30, metrics="")) as hub, SmallServer(hub) as server:
        assert main(["warm", "--server", server.url, "--data", str(write(tmp_path / "docs.jsonl", 100))]) == 3
    said = capsys.readouterr().out
    assert "contexts are not stored any more" in said and "hub.arena_gib enlarges the arena" in said


def test_conversations_are_computed_as_they_are(server, warm, tmp_path):
    own = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text(1)}]
    bare = [{"role": "user", "content": text(2)}, {"role": "assistant", "content": text(3)}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in (own, bare)))
    warm(file)
    assert sorted(server.computed, key=str) == sorted([own, [SYSTEM, *bare]], key=str)


def test_a_model_without_a_chat_template_gets_plain_text_and_what_it_refuses_is_left_out(server, warm, tmp_path):
    server.has_template = False
    file = write(tmp_path / "docs.jsonl", 2)
    chat, empty = json.dumps({"messages": [{"role": "user", "content": "x"}]}), json.dumps({"text": " "})
    file.write_text("\n".join([file.read_text(), chat, empty, "no JSON", json.dumps({"text": text(2, 300)})]))
    said = warm(file, code=3)
    alone = [f"{SYSTEM['content']}\n\n{text(number)}" for number in range(2)]
    assert sorted(server.computed[:2]) == alone and len(server.computed) == 4
    assert "4 documents are left out; the first one: " in said and "docs.jsonl:4 has neither" in said


def test_folders_of_texts_are_read(server, warm, tmp_path):
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    for file, content in (("a.TXT", text(0)), ("below/b.md", text(1)), ("below/c.md", text(1)), ("d.png", "\x89PNG")):
        (folder / file).write_text(content)
    assert "2 documents: 4 contexts" in warm(folder)
    assert sorted(prompt[1]["content"] for prompt in server.computed[:2]) == [text(0), text(1)]


def test_a_busy_server_gets_no_more_at_a_time_and_progress_is_told(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("blendhub.cli.warm.TOLD_EVERY_S", 0.0)
    monkeypatch.setattr("blendhub.cli.warming.server.BUSY_PAUSE_S", 0.05)
    server.refuses, server.seconds = 3, 0.002
    data = str(write(tmp_path / "docs.jsonl", 30))
    assert main(["warm", "--server", server.url, "--data", data, "--concurrency", "4"]) == 0
    out, error = capsys.readouterr()
    assert "60 contexts are computed" in out and server.most_at_once <= 4
    assert error.splitlines()[-1] == "60 contexts are computed, 0 were stored"


def complaint(capsys, *arguments: str) -> str:
    assert main(["warm", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("blendhub: ") and error.count("\n") == 1
    return error


def test_what_is_no_server_with_blendhub_is_refused(server, tmp_path, capsys):
    data = ["--data", str(write(tmp_path / "docs.jsonl", 30))]

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *said: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_address[1]}"
        assert "does not answer /v1/models as vLLM does" in complaint(capsys, "--server", url, *data)
    assert "should be an address such as http" in complaint(capsys, "--server", "localhost", *data)
    server.dies_after = 12
    said = complaint(capsys, "--server", server.url, *data, "--concurrency", "2")
    assert f"no server answers at {server.url}" in said and "repeat the command" in said
    server.dies_after, server.has_blendhub = None, False
    said = complaint(capsys, "--server", server.url, *data)
    assert "answers without a report of BlendHub: start vLLM with --kv-transfer-config" in said
    assert "cannot read" in complaint(capsys, "--server", server.url, "--data", "/nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "has no documents" in complaint(capsys, "--server", server.url, "--data", str(tmp_path / "empty.jsonl"))
