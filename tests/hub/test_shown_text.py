"""The text of what requests reused, over HTTP: shown by a hub that was started to show it, and by no other."""

import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blendhub.client.hub_client import HubClient
from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.core.spans import Match, Span
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import HubInThread
from blendhub.hub.http import tokenizers
from blendhub.hub.limits import MOST_SHOWN_CHARACTERS, MOST_TOKENIZERS
from tests.prompt_notes import prompt_report

LAYOUT = KVLayout(layers=1, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=64)
TEXT = np.arange(1000, 1256, dtype=np.uint32)
LONG = np.arange(5000, 5000 + 64 * 40, dtype=np.uint32)


class Words:
    """A stand-in for a tokenizer: a token is a word with its number."""

    def decode(self, token_ids, **how):
        if token_ids and max(token_ids) >= 10**6:
            raise OverflowError("no such token")
        return " ".join(f"w{one}" for one in token_ids)


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(tokenizers, "load", lambda model: Words())


def hub(**more) -> HubInThread:
    return HubInThread(HubConfig(arena_gib=0.01, metrics="127.0.0.1:0", **{"show_text": True, **more}))


@pytest.fixture
def running() -> Iterator[HubInThread]:
    with hub() as running:
        yield running


def engine(running: HubInThread, name: str = "e", model: str = "a-model") -> HubClient:
    client = running.connect()
    client.register(name, Namespace(model=model, layout=LAYOUT), rank=0)
    return client


def store(client: HubClient, tokens: np.ndarray, **more) -> int:
    """Returns the run."""
    reserved = client.reserve(tokens, Span(0, len(tokens)), **more)
    client.commit(reserved.right, len(tokens))
    (match,) = client.lookup(tokens, acquire=False, **more).matches
    return match.run


def report(client: HubClient, *sources: Match, variant: Variant | None = None) -> None:
    moved = {"moved": [one.span for one in sources]}
    client.report_prompts([prompt_report("r", 9000, 0, moved, sources, variant=variant)])


def get(running: HubInThread, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{running.metrics_address}/{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def shown(running: HubInThread, request: str = "r", engine: str = "e") -> dict:
    asked = urllib.parse.urlencode({"engine": engine, "request": request})
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            status, body = get(running, f"text.json?{asked}")
        except ConnectionError:  # while a large module is imported, on a busy machine, as the page asks again
            continue
        assert status == 200, body
        text = json.loads(body)
        if not text["loading"]:
            return text
        time.sleep(0.05)
    raise AssertionError("its tokenizer was not loaded")


def test_the_text_is_that_of_the_stored_tokens(running, words):
    with engine(running) as client:
        run = store(client, TEXT)
        report(client, Match(Span(10, 30), run, 100, False), Match(Span(40, 42), run, 0, False))
        text = shown(running)
        assert text["model"] == "a-model" and text["problem"] == ""
        first, second = text["stretches"]
        assert first["span"] == [10, 30] and first["text"] == " ".join(f"w{n}" for n in range(1100, 1120))
        assert second["text"] == "w1000 w1001" and first["note"] == second["note"] == ""
        assert json.loads(get(running, "page.json")[1])["shows_text"] is True


def test_without_the_option_there_is_no_text_and_no_token_anywhere(words):
    with hub(show_text=False) as running, engine(running) as client:
        # No number of the page is like these by chance.
        tokens = np.arange(4_123_456_000, 4_123_456_256, dtype=np.uint32)
        report(client, Match(Span(10, 30), store(client, tokens), 100, False))
        status, body = get(running, "text.json?engine=e&request=r")
        assert status == 404 and "--show-text" in body
        status, page = get(running, "page.json")
        assert status == 200 and json.loads(page)["shows_text"] is False
        assert "4123456" not in page
        assert all(chunk.tokens is None for index in running.hub.service.state.indexes for chunk in index.chunks())


def test_text_stands_under_the_rules_of_the_page(running, words):
    with engine(running) as client:
        report(client, Match(Span(10, 30), store(client, TEXT), 100, False))
        asked = urllib.request.Request(
            f"http://{running.metrics_address}/text.json?engine=e&request=r", headers={"Host": "evil.example"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=30)
        assert refused.value.code == 403


def test_long_text_is_cut_and_says_so(running, words):
    with engine(running) as client:
        run = store(client, LONG)
        report(client, Match(Span(0, len(LONG)), run, 0, False))
        (stretch,) = shown(running)["stretches"]
        assert len(stretch["text"]) == MOST_SHOWN_CHARACTERS and stretch["text"].startswith("w5000 w5001 ")
        assert stretch["note"] == "It is cut off: at most 2,000 characters and tokens are shown."


def test_what_was_dropped_meanwhile_is_said_to_be(running, words):
    with engine(running) as client:
        run = store(client, TEXT)
        report(client, Match(Span(0, 256), run, 0, False), Match(Span(300, 364), run, 64, False))
        state = running.hub.service.state
        (index,) = state.indexes
        gone = threading.Event()

        def drop() -> None:
            chunk = index.runs[run].chunks[64]
            state.cache.remove(chunk)
            index.drop(chunk)
            gone.set()

        running._loop.call_soon_threadsafe(drop)
        assert gone.wait(10)
        first, second = shown(running)["stretches"]
        assert first["note"] == "64 of its 256 tokens are no longer stored." and "w1063 w1128" in first["text"]
        assert second["text"] == "" and second["note"] == "It is no longer stored."
        client.clear()
        assert [one["note"] for one in shown(running)["stretches"]] == ["It is no longer stored."] * 2


def test_text_is_that_of_the_request_s_own_namespace_only(running, words):
    salt = Variant(cache_salt="a-secret-salt")
    with (
        engine(running) as client,
        engine(running, "sibling") as sibling,
        engine(running, "stranger", "another-model") as stranger,
    ):
        salted = store(client, TEXT, variant=salt)
        report(client, Match(Span(0, 2), salted, 0, False), variant=salt)
        report(sibling, Match(Span(0, 2), salted, 0, False))
        report(stranger, Match(Span(0, 2), salted, 0, False), variant=salt)
        assert shown(running)["stretches"][0]["text"] == "w1000 w1001"
        for other in ("sibling", "stranger"):
            (refused,) = shown(running, engine=other)["stretches"]
            assert refused["text"] == "" and refused["note"] == "It is no longer stored."
        assert "a-secret-salt" not in get(running, "page.json?engine=e")[1]
        assert get(running, "text.json?engine=stranger&request=other")[0] == 404


def test_sources_that_cannot_be_harm_nothing(running, words):
    with engine(running) as client:
        run = store(client, TEXT)
        sources = [
            Match(Span(0, 2**40), run, 0, False),
            Match(Span(0, 5), run, 2**40, False),
            Match(Span(0, 5), 2**62, 0, False),
        ]
        client.report_prompts([prompt_report("r", 10, 0, {}, sources)])
        texts = [one["text"] for one in shown(running)["stretches"]]
        assert texts[0].startswith("w1000") and texts[1:] == ["", ""]


def test_runs_of_the_hub_before_have_other_ids():
    runs = []
    for _ in range(2):
        with hub() as running, engine(running) as client:
            runs.append(store(client, TEXT))
    assert runs[0] != runs[1]


def test_the_id_of_a_run_says_nothing_of_the_next_one(running):
    with engine(running) as client:
        runs = [store(client, TEXT + np.uint32(at), variant=Variant(cache_salt=f"{at}")) for at in range(6)]
    gaps = {abs(one - other) for one in runs for other in runs if one is not other}
    assert min(gaps) > 2**20 and max(runs) < 2**53, "a page's script reads them as numbers"


def test_token_ids_are_shown_where_there_is_no_tokenizer(running, monkeypatch):
    monkeypatch.setattr(tokenizers, "load", lambda model: "token ids are shown, because there is none")
    with engine(running) as client:
        report(client, Match(Span(0, 3), store(client, TEXT), 0, False))
        text = shown(running)
        assert text["problem"] == "token ids are shown, because there is none"
        assert text["stretches"][0]["text"] == "1000 1001 1002"


def test_tokens_that_the_tokenizer_does_not_know_are_shown_as_ids(running, words):
    with engine(running) as client:
        report(client, Match(Span(0, 2), store(client, TEXT + np.uint32(10**6)), 0, False))
        text = shown(running)
        assert "cannot decode them: OverflowError" in text["problem"]
        assert text["stretches"][0]["text"] == "1001000 1001001"


def test_a_slow_tokenizer_holds_up_neither_the_answer_nor_the_hub(running, monkeypatch):
    loads, go_on = [], threading.Event()

    def load(model):
        loads.append(model)
        go_on.wait(30)
        return Words()

    monkeypatch.setattr(tokenizers, "load", load)
    monkeypatch.setattr(tokenizers, "PATIENCE_S", 0.05)
    with engine(running) as client:
        report(client, Match(Span(0, 2), store(client, TEXT), 0, False))
        for _ in range(3):
            text = json.loads(get(running, "text.json?engine=e&request=r")[1])
            assert text["loading"] and text["model"] == "a-model" and text["stretches"] == []
        client.lookup(TEXT)
        go_on.set()
        assert shown(running)["stretches"][0]["text"] == "w1000 w1001" and loads == ["a-model"]


def test_few_tokenizers_are_kept(running, monkeypatch):
    loads = []
    monkeypatch.setattr(tokenizers, "load", lambda model: loads.append(model) or Words())
    for number in [*range(MOST_TOKENIZERS), 0, MOST_TOKENIZERS, 0, 1]:
        with engine(running, f"e{number}", f"m{number}") as client:
            run = store(client, TEXT) if f"m{number}" not in loads else None
            if run:
                report(client, Match(Span(0, 2), run, 0, False))
        assert shown(running, engine=f"e{number}")["stretches"][0]["text"] == "w1000 w1001"
    assert loads == ["m0", "m1", "m2", "m3", "m4", "m1"]


@pytest.mark.slow
def test_a_client_s_name_of_a_model_makes_the_hub_ask_no_other_machine(monkeypatch):
    pytest.importorskip("transformers", reason="it comes with vLLM")
    asked = []

    def record(*address, **how):
        asked.append(address)
        raise OSError("this machine alone")

    monkeypatch.setattr(socket, "getaddrinfo", record)
    monkeypatch.setattr(socket.socket, "connect", record)
    problem = tokenizers.load("a-stranger/a-name")
    assert asked == [] and "a hub asks no other machine" in problem


@pytest.mark.slow
def test_a_tokenizer_is_loaded_from_the_model_s_files(tmp_path: Path, running):
    transformers = pytest.importorskip("transformers", reason="it comes with vLLM; `make setup` installs it")
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(2000)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    with engine(running, model=str(tmp_path)) as client, engine(running, "lost", f"{tmp_path}/lost") as lost:
        report(client, Match(Span(0, 2), store(client, TEXT), 5, False))
        report(lost, Match(Span(0, 2), store(lost, TEXT), 5, False))
        assert shown(running)["stretches"][0]["text"] == "w1005 w1006"
        of_lost = shown(running, engine="lost")
        assert of_lost["stretches"][0]["text"] == "1005 1006"
        assert "token ids are shown, because the tokenizer of the model" in of_lost["problem"]
