"""The OpenAI-compatible server, as a person starts it: in several processes, asked over HTTP, ended by a signal."""

import json
import random
import re
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from blendhub.cli import main
from blendhub.client.hub_client import HubClient
from blendhub.core.layout import MIN_DONOR_CONTEXT
from blendhub.core.spans import total
from blendhub.hub.memory.default_size import default_arena_bytes
from harness.engines import Server
from harness.engines.engine import transfer_config
from harness.engines.tiny_model import SHAPE, make_tiny_model
from harness.engines.words import add_tokenizer, numbered
from harness.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS: dict[str, Any] = {"max_model_len": 2048, "enable_prompt_tokens_details": True}
SOON_S = 30.0
"""The server's counters and its hub hear of a request a moment after its response."""


class AskedServer(Server):
    """``vllm serve``, and what its clients ask."""

    hub: str
    """Where its embedded hub listens besides."""

    def complete(self, prompt: list[int], **options: object) -> dict:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0} | options
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).raise_for_status().json()

    def ask(self, prompt: list[int], **blendhub: object) -> dict:
        """What BlendHub tells of a completion."""
        said = {"kv_transfer_params": {"blendhub": blendhub}} if blendhub else {}
        return self.complete(prompt, **said)["kv_transfer_params"]["blendhub"]

    def store(self, prompt: list[int]) -> dict:
        """Ask, and wait until the KV of the prompt is stored: its commit may come after the response."""
        report = self.ask(prompt)
        with HubClient(self.hub) as client:
            wait_until(
                lambda: client.preview(np.asarray(prompt, np.uint32)).result().exact_tokens == len(prompt), SOON_S
            )
        return report

    def counters(self) -> Counter[str]:
        """BlendHub's counters on vLLM's metrics endpoint; those with a label as ``name:reason``."""
        counters: Counter[str] = Counter()
        page = httpx.get(f"{self.url}/metrics", timeout=60).raise_for_status().text
        for name, labels, count in re.findall(r"^vllm:blendhub_(\w+)_total\{(.*)\} (\S+)$", page, re.M):
            reason = re.search(r'reason="(\w+)"', labels)
            counters[f"{name}:{reason[1]}" if reason else name] += int(float(count))
        return counters

    def arenas(self) -> set[Path]:
        """The shared memory of BlendHub that its processes have mapped."""
        arenas = set()
        for pid in self.processes():
            with suppress(FileNotFoundError):  # it ended just now
                arenas |= set(map(Path, re.findall(r"/dev/shm/blendhub-\S+", Path(f"/proc/{pid}/maps").read_text())))
        return arenas


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    model = make_tiny_model(folder / "tiny")
    add_tokenizer(model, numbered(SHAPE["vocab_size"]))
    endpoint = f"ipc://{folder}/hub.sock"
    hub = {"arena_gib": 0.25, "listen": [{"endpoint": endpoint}], "embedded": "process"}  # as by default on GPUs
    settings = {"hub": hub, "selector": {"name": "hkvd"}, "policy": {"min_reused_tokens": 64}}
    with AskedServer(model, folder / "log", transfer_config(settings), **OPTIONS) as server:
        server.hub = endpoint
        server.wait_until_up()
        yield server


def test_a_request_may_say_what_it_wants_and_its_response_tells_what_was_reused(server, texts):
    document, unstored = texts.new(400), texts.new(200)
    fates = ("engine", "exact", "settled", "moved", "recomputed", "hole", "copied", "fetched")
    nothing = {f"{fate}_tokens": 0 for fate in fates}
    reason = "nothing of this prompt is stored"
    assert server.store([*texts.new(MIN_DONOR_CONTEXT), *document]) == nothing | {"reason": reason}
    moved = {"moved_tokens": 400, "recomputed_tokens": 120, "hole_tokens": 50, "ratio": 0.3, "approximate_from": 50}
    report = server.ask([*texts.new(50), *document, *texts.new(9)])
    # vLLM still has all blocks of the document but for those that its end does not fill.
    assert report == nothing | moved | {"copied_tokens": report["copied_tokens"]} and report["copied_tokens"] > 350
    server.ask([*texts.new(MIN_DONOR_CONTEXT), *unstored], store=False)
    half = server.ask([*texts.new(40), *document, *texts.new(9)], recompute_ratio=0.5, explain=True)
    assert half["moved_tokens"] == 400 and half["recomputed_tokens"] == 200
    assert half["spans"]["holes"] == [[0, 40]] and half["spans"]["moved"] == [[40, 440]]
    for mode in ("exact", "off"):
        report = server.ask([*texts.new(41), *document, *texts.new(9)], mode=mode)
        assert report["moved_tokens"] == 0 and "reason" in report
    assert server.ask([*texts.new(42), *unstored, *texts.new(9)])["moved_tokens"] == 0
    server.store(unstored)
    shallow = server.ask([*texts.new(43), *unstored, *texts.new(9)])
    assert shallow["reason"].startswith("200 tokens are not moved: it is stored only where it was computed with")
    assert "unknown field `ratio`" in server.ask(texts.new(100), ratio=0.5)["reason"]


def test_usage_counts_the_tokens_that_were_brought_back_and_not_those_that_were_computed(server, texts):
    document = texts.new(400)
    server.store([*texts.new(MIN_DONOR_CONTEXT), *document])
    answer = server.complete([*texts.new(50), *document, *texts.new(9)])
    report = answer["kv_transfer_params"]["blendhub"]
    assert report["moved_tokens"] == 400 and report["recomputed_tokens"] == 120
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 400 - 120


def test_which_responses_carry_a_report_is_as_reports_md_says(server, texts):
    prompt, others = texts.new(100), texts.new(90)

    def carries(asked: Any = prompt, **options: object) -> dict | None:
        return server.complete(asked, max_tokens=4, ignore_eos=True, **options)["kv_transfer_params"]

    (answer,) = server.complete(prompt, max_tokens=4, ignore_eos=True, return_token_ids=True)["choices"]
    word, token = answer["text"].split()[1], answer["token_ids"][1]
    assert carries() and carries(stop_token_ids=[token])
    assert not carries(stop=[word])
    assert carries([prompt, others])["blendhub"] == carries(prompt)["blendhub"] != carries(others)["blendhub"]
    body = {"model": "tiny", "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    streamed = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().text
    assert "cached_tokens" in streamed and "blendhub" not in streamed


def test_what_a_tenant_stored_is_deleted_by_its_salt(server, texts):
    server.ask(texts.new(400))
    with HubClient(server.hub) as client:

        def salts():
            """How many salts have stored something, no salt among them."""
            return sum(sums["variants"] for sums in client.stats().result().namespaces.values())

        wait_until(lambda: salts() > 0, SOON_S)
        before = salts()
        server.complete(texts.new(400), cache_salt="tenant")
        wait_until(lambda: salts() == before + 1, SOON_S)
        client.forget("tenant").result()
        wait_until(lambda: salts() == before, SOON_S)


def test_counters_are_on_the_metrics_endpoint(server, texts):
    before = server.counters()
    document = texts.new(300)
    server.store([*texts.new(MIN_DONOR_CONTEXT), *document])
    server.ask([*texts.new(70), *document, *texts.new(9)], recompute_ratio=0.25)
    server.ask([*texts.new(70), *document, *texts.new(9)], recompute_ratio=0.25, store=False)
    server.ask([*document, *texts.new(100)], mode="off")
    expected = {
        "requests_blended": 2,
        "requests_with_holes": 2,
        "tokens_moved": 600,
        "tokens_recomputed": 150,
        "tokens_in_holes": 140,
        "requests_without_reuse:nothing_stored": 1,
        "requests_without_reuse:off": 1,
    }

    def check() -> None:
        counted = server.counters() - before
        assert {name: counted[name] for name in expected} == expected and not counted["loads_failed"]
        assert counted["saved_tokens"] >= 300 + MIN_DONOR_CONTEXT

    wait_until(check, SOON_S)


def test_blendhub_warm_computes_a_corpus_once(server, tmp_path, capsys):
    words = random.Random(1)
    corpus = [" ".join(f"w{words.randrange(2, 1000)}" for _ in range(n)) for n in (200, 150, 90, 450, 300)]
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in corpus))
    (tmp_path / "system.txt").write_text("w7 w8 w9")
    files = ["--data", str(tmp_path / "docs.jsonl"), "--system", str(tmp_path / "system.txt")]
    assert main(["warm", "--server", server.url, *files]) == 0
    said = capsys.readouterr().out
    # The first two documents stand behind the next two, and the others behind the first two.
    assert "5 documents: 7 contexts are computed" in said and "0 contexts were stored" in said
    computed = sum(len(text.split()) for text in [*corpus, *corpus[:4]])
    tokens = int(said.partition("computed, ")[2].partition(" tokens")[0].replace(",", ""))
    assert computed <= tokens <= 1.1 * computed, "what stands before a document is loaded"
    assert main(["warm", "--server", server.url, *files]) == 0
    assert "0 contexts are computed, 0 tokens; 7 contexts were stored" in capsys.readouterr().out
    texts = [int(word[1:]) for text in reversed(corpus) for word in text.split()]
    prompt = [*range(2, 32), *texts, 5]
    with HubClient(server.hub) as client:
        wait_until(
            lambda: total(m.span for m in client.preview(np.asarray(prompt, np.uint32)).result().matches) >= 1190,
            SOON_S,
        )
    report = server.ask(prompt)
    assert report["moved_tokens"] == len(texts) == 1190, report


def test_a_signal_ends_it_and_no_shared_memory_is_left(server):
    """The last test of this server. vLLM kills the engine's process and all of its children at once."""
    (arena,) = server.arenas()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0, server.log[-3000:]
    wait_until(lambda: not arena.exists(), SOON_S)


@pytest.mark.long
@pytest.mark.alone
def test_data_parallel_engines_of_a_machine_share_what_one_alone_would_have(model, tmp_path):
    """vLLM configures each engine of a dense model as if it were alone, and each has a hub."""
    alone_gib = default_arena_bytes() / 2**30
    # vLLM's CPU platform has cores for one engine only on each NUMA node, unless it binds none.
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 512, "data_parallel_size": 2}
    with Server(model, tmp_path / "log", transfer_config({}), environment=unbound, **options) as server:
        server.wait_until_up()
        sizes = re.findall(r"of 2 data-parallel engines .* its arena has ([\d.]+) GiB", server.log)
    assert len(sizes) == 2 and 0.5 * alone_gib < sum(map(float, sizes)) < 1.1 * alone_gib
