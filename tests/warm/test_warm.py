"""``blendhub warm`` against a small server over a real hub; ``test_engine_server.py`` has it with vLLM's."""

import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from blendhub.cli import main
from blendhub.cli.warming.prompts import MAX_COMPANIES, companies_of
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from harness.waiting import wait_until
from tests.warm.small_server import SmallServer

pytestmark = pytest.mark.slow

SYSTEM = {"role": "system", "content": "you answer questions about texts"}


def text(number: int, words: int = 80) -> str:
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
    """Runs the command, and gives what it says."""
    (tmp_path / "system").write_text(SYSTEM["content"] + "\n")

    def run(data: Path, *arguments: str, code: int = 0) -> str:
        named = ["--server", server.url, "--system", str(tmp_path / "system"), "--data", str(data)]
        assert main(["warm", *named, *arguments]) == code
        return capsys.readouterr().out

    return run


def test_each_document_is_computed_behind_others_from_where_it_moves_for_each_salt(server, warm, tmp_path):
    data = write(tmp_path / "docs.jsonl", 24)
    assert "24 documents: 28 contexts are computed" in warm(data), "in four companies of four"
    assert all(prompt[0] == SYSTEM for prompt in server.computed)
    documents = [text(number) for number in range(24)]
    contents = [prompt[1]["content"].split("\n\n") for prompt in server.computed]
    assert sorted(content[-1] for content in contents[4:]) == sorted(documents)
    for *company, document in contents[4:]:
        assert len(company) == 4 and document not in company and company in contents[:4]
    assert all(map(server.moves, documents)) and not server.moves(text(99))
    assert "28 contexts are computed" in warm(data, "--cache-salt", "a-tenant")
    assert "28 contexts were stored" in warm(data, "--cache-salt", "a-tenant")
    longer = write(tmp_path / "longer.jsonl", 26)
    assert "28 contexts were stored" in warm(longer), "added documents change no other's company"


def test_with_recurrent_layers_each_document_is_computed_once_more_behind_another_than_before(server, warm, tmp_path):
    server.has_recurrent_layers = True
    warm(write(tmp_path / "docs.jsonl", 24))
    contents = [prompt[1]["content"].split("\n\n") for prompt in server.computed]
    before, again = contents[4:28], contents[28:]
    assert sorted(content[-1] for content in again) == sorted(content[-1] for content in before)
    assert {tuple(content[-2:]) for content in again}.isdisjoint(tuple(content[-2:]) for content in before)


def test_a_small_corpus_is_computed_as_far_behind_as_it_goes_and_the_output_says_so(server, warm, tmp_path):
    data = write(tmp_path / "docs.jsonl", 4)
    said = warm(data, code=3)
    assert "4 documents have fewer than 256 tokens before them" in said and not server.moves(text(0))
    assert "fewer" not in warm(write(data, 5)) and all(server.moves(text(number)) for number in range(5))
    (tmp_path / "system").write_text(" ".join(["long"] * 300))
    assert "fewer" not in warm(write(data, 1)), "the system text counts"


def test_companies_are_large_enough_and_of_other_documents_and_most_are_shared():
    lengths = [random.Random(1).randrange(20, 400) for _ in range(500)]
    companies = companies_of(lengths, 256)
    for number, company in enumerate(companies):
        assert number not in company and 256 <= sum(lengths[other] for other in company) < 256 + 400
    assert len(set(companies)) <= MAX_COMPANIES
    assert companies_of(lengths[:300], 256) == companies[:300]
    assert companies_of(lengths, 0) == [()] * 500 and companies_of([300], 256) == [()]


def test_a_stopped_command_goes_on_where_it_was(server, warm, tmp_path):
    data = write(tmp_path / "docs.jsonl", 40)
    server.seconds, server.at_once = 0.02, threading.Semaphore(2)
    # A child of `nohup make test &` inherits that SIGINT is ignored.
    restored = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import blendhub.cli.__main__"
    command = [sys.executable, "-c", restored, "warm", "--server", server.url, "--data", str(data)]
    command += ["--system", str(tmp_path / "system"), "--concurrency", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stopped:
        wait_until(lambda: len(server.computed) >= 30, 60.0, 0.01)
        stopped.send_signal(signal.SIGINT)
        said, _ = stopped.communicate(timeout=30)
    assert stopped.returncode == 130 and "Stopped: the same command goes on from here." in said
    assert 30 <= len(server.computed) < 47 and not server.refused
    warm(data, "--concurrency", "2")
    computed = Counter(map(str, server.computed))
    assert len(server.computed) == 47 and set(computed.values()) == {1}, "nothing is computed twice"


def test_what_did_not_fit_is_said_with_the_key_that_enlarges_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("blendhub.cli.warm.STORED_WITHIN_S", 0.0)
    with HubInThread(HubConfig(arena_gib=24 * 1024 / 2**30, metrics="")) as hub, SmallServer(hub) as server:
        assert main(["warm", "--server", server.url, "--data", str(write(tmp_path / "docs.jsonl", 100))]) == 3
    said = capsys.readouterr().out
    assert "contexts are not stored any more" in said and "hub.arena_gib enlarges the arena" in said


def test_conversations_are_computed_as_they_are_and_folders_of_texts_are_read(server, warm, tmp_path):
    own = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text(1)}]
    bare = [{"role": "user", "content": text(2)}, {"role": "assistant", "content": text(3)}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"messages": messages}) for messages in (own, bare)))
    warm(chats)
    assert sorted(server.computed, key=str) == sorted([own, [SYSTEM, *bare]], key=str)
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    for file, content in (("a.TXT", text(4)), ("below/b.md", text(5)), ("below/c.md", text(5)), ("d.png", "\x89PNG")):
        (folder / file).write_text(content)
    assert "2 documents: 4 contexts" in warm(folder, "--min-donor-context", "80")
    assert sorted(prompt[1]["content"] for prompt in server.computed[2:4]) == [text(4), text(5)]


def test_a_model_without_a_chat_template_gets_plain_text_and_what_it_refuses_is_left_out(server, warm, tmp_path):
    server.has_template = False
    file = write(tmp_path / "docs.jsonl", 2)
    chat, empty = json.dumps({"messages": [{"role": "user", "content": "x"}]}), json.dumps({"text": " "})
    file.write_text("\n".join([file.read_text(), chat, empty, "no JSON", json.dumps({"text": text(2, 500)})]))
    said = warm(file, code=3)
    alone = [f"{SYSTEM['content']}\n\n{text(number)}" for number in range(2)]
    assert sorted(server.computed[:2]) == alone and len(server.computed) == 4
    assert server.computed[2].startswith((f"{alone[0]}\n\n", f"{alone[1]}\n\n"))
    assert "4 documents are left out; the first one: " in said and "docs.jsonl:4 has neither" in said


def test_a_busy_server_is_asked_again_and_progress_is_told(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("blendhub.cli.warm.TOLD_EVERY_S", 0.0)
    monkeypatch.setattr("blendhub.cli.warming.server.BUSY_PAUSE_S", 0.01)
    server.seconds, server.at_once = 0.002, threading.Semaphore(1)
    data = str(write(tmp_path / "docs.jsonl", 30))
    assert main(["warm", "--server", server.url, "--data", data, "--concurrency", "4"]) == 0
    out, error = capsys.readouterr()
    assert "36 contexts are computed" in out and server.refused
    assert error.splitlines()[-1] == "36 contexts are computed, 0 were stored"


def test_what_is_no_server_with_blendhub_and_no_data_are_refused_in_a_line(server, tmp_path, capsys):
    documents, empty = write(tmp_path / "docs.jsonl", 30), tmp_path / "empty.jsonl"
    empty.write_text("\n")

    def complaint(url: str = server.url, data: object = documents) -> str:
        assert main(["warm", "--server", url, "--data", str(data), "--concurrency", "2"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("blendhub: ") and error.count("\n") == 1
        return error

    assert "should be an address such as http" in complaint("localhost")
    assert "cannot read" in complaint(data="/nowhere.jsonl") and "has no documents" in complaint(data=empty)
    server.dies_after = 12
    said = complaint()
    assert f"no server answers at {server.url}" in said and "repeat the command" in said
    server.dies_after, server.has_blendhub = None, False
    assert "answers without a report of BlendHub: start vLLM with --kv-transfer-config" in complaint()
    server.has_models = False
    assert "does not answer /v1/models as vLLM does" in complaint()
