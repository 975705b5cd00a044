"""``blendhub warm`` without a server: it starts vLLM, fills a store, and finds everything there the next time."""

import json
import random
import re

import pytest

from benchmarks.load.words import add_tokenizer
from blendhub.cli import main
from harness.engines.engine import ENVIRONMENT
from harness.engines.tiny_model import SHAPE, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
ENGINE = {"dtype": "float32", "block_size": 32, "max_model_len": 1024, "enforce_eager": True}


def test_a_corpus_is_computed_into_a_store_once_and_its_blends_are_audited(tmp_path, monkeypatch, capsys):
    for name, value in ENVIRONMENT.items():
        if "MULTIPROCESSING" not in name:  # the engine is in a separate process, as it is by default
            monkeypatch.setenv(name, value)
    model = make_tiny_model(tmp_path / "model")
    add_tokenizer(model, SHAPE["vocab_size"])
    words = random.Random(1)
    lines = [{"text": " ".join(f"w{words.randrange(2, 1000)}" for _ in range(n))} for n in (200, 150, 90, 1200, 300)]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "system.txt").write_text("w7 w8 w9")
    store = {"name": "disk", "options": {"path": str(tmp_path / "store")}}
    command = ["warm", "--model", str(model), "--data", str(tmp_path / "docs.jsonl")]
    command += ["--system", str(tmp_path / "system.txt"), "--engine", json.dumps(ENGINE)]
    command += ["--settings", json.dumps({"hub": {"arena_gib": 0.1, "metrics": "", "store": store}})]
    assert main(command) == 0
    said = capsys.readouterr().out
    # A prompt holds two parts of 510 tokens: the long document has three.
    assert "5 documents: 14 contexts are computed" in said and "0 contexts were warm" in said
    assert "1 documents are computed in parts: a prompt of 1,024 tokens" in said
    computed = sum(len(line["text"].split()) for line in lines)
    tokens = int(said.partition("computed, ")[2].partition(" tokens")[0].replace(",", ""))
    assert 2 * computed <= tokens <= 2.2 * computed, "what stands before a document is loaded"
    assert main([*command, "--verify", "4"]) == 0
    said = capsys.readouterr().out
    assert "0 contexts are computed, 0 tokens" in said and "14 contexts were warm" in said
    # One of few documents that come from the store may be fetched too late.
    assert re.search(r"\d of [1-4] blends agree with full prefill on the first token", said)
