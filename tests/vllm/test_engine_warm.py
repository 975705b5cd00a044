"""``blendhub warm`` with vLLM's server: a corpus is computed once, and found the next time."""

import json
import random

import pytest

from blendhub.cli import main
from blendhub.system.served_vllm import transfer_config
from harness.engines import Server
from harness.engines.tiny_model import SHAPE, make_tiny_model
from harness.engines.words import add_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_corpus_is_computed_once(tmp_path, capsys):
    model = make_tiny_model(tmp_path / "model")
    add_tokenizer(model, SHAPE["vocab_size"])
    words = random.Random(1)
    texts = [" ".join(f"w{words.randrange(2, 1000)}" for _ in range(n)) for n in (200, 150, 90, 450, 300)]
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "system.txt").write_text("w7 w8 w9")
    config = transfer_config({"hub": {"arena_gib": 0.1}})
    with Server(model, tmp_path / "log", config, max_model_len=1024) as server:
        server.wait_until_up()
        command = ["warm", "--server", f"http://127.0.0.1:{server.port}", "--data", str(tmp_path / "docs.jsonl")]
        command += ["--system", str(tmp_path / "system.txt")]
        assert main(command) == 0
        said = capsys.readouterr().out
        assert "5 documents: 10 contexts are computed" in said and "0 contexts were stored" in said
        computed = sum(len(text.split()) for text in texts)
        tokens = int(said.partition("computed, ")[2].partition(" tokens")[0].replace(",", ""))
        assert 2 * computed <= tokens <= 2.2 * computed, "what stands before a document is loaded"
        assert main(command) == 0
        assert "0 contexts are computed, 0 tokens; 10 contexts were stored" in capsys.readouterr().out
