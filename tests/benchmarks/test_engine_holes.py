"""The benchmark of holes from begin to end, with a small random model: what it reports is nonsense, but whole."""

import json
import random
import re
import sys

import pytest

pytest.importorskip("vllm", reason="the benchmark serves with vLLM; `make setup` installs it")

from benchmarks.holes import __main__ as holes
from benchmarks.holes.figures import FIGURES, PHASES
from harness.engines.tiny_model import make_tiny_model
from tests.benchmarks.word_model import WORDS, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), **SMALL)
    return str(make_tokenizer(folder))


def write_questions(file, questions):
    """So many questions to four documents of a hundred words each, all different."""
    words = list(WORDS)[3:]
    entries = []
    for number in range(questions):
        texts = [random.Random(f"{number} {at}").choices(words, k=100) for at in range(4)]
        entries.append({"question": "Where ?", "answer": "Rome", "documents": [" ".join(text) for text in texts]})
    file.write_text(json.dumps(entries))
    return file


def test_a_hole_is_filled_in_the_first_pass_and_reused_in_the_second(model, tmp_path, monkeypatch):
    file = write_questions(tmp_path / "data.json", 6)
    said = "--quick --hole-ids first --hole-positions 1 --inflate 1 --separator ? --method blend contiguous"
    said += f" --selector first_k --recompute-ratio 0.3 --model {model} --data {file} --json {tmp_path}/holes.json"
    monkeypatch.setattr(sys, "argv", ["holes", *said.split()])
    holes.main()
    written = json.loads((tmp_path / "holes.json").read_text())
    rows = {row["id"]: row["value"] for row in written["rows"]}
    ids = {f"{way}_pass_{number}_{name}" for way in ("blend_30", "contiguous_30") for number in (1, 2)
           for name in (*FIGURES, *PHASES)}  # fmt: skip
    assert rows.keys() == ids
    for way in ("blend_30", "contiguous_30"):
        assert 0 < rows[f"{way}_pass_1_hit_rate"] < rows[f"{way}_pass_2_hit_rate"]
        assert all(rows[f"{way}_pass_2_{phase}"] > 0 for phase in ("lookup", "load", "recompute"))
        assert rows[f"{way}_pass_1_save"] > 0
    # The hole is the second document: without holes only the first one is reused.
    assert rows["contiguous_30_pass_1_hit_rate"] < 0.5 < rows["blend_30_pass_1_hit_rate"]
    assert rows["blend_30_pass_1_with_holes"] == 1.0
    assert rows["contiguous_30_pass_1_with_holes"] == 0
    # What is not stored behind the first pass are a few tokens at the end of some prompt's hole.
    assert rows["blend_30_pass_2_in_holes"] < 0.01 < 0.15 < rows["blend_30_pass_1_in_holes"] < 0.25
    (first, second), _ = written["details"].values()
    assert len(first["queries"]) == 4
    for query in [*first["queries"], *second["queries"]]:
        assert query["first_token_s"] <= query["ended_s"] and query["between_tokens_s"] > 0
        assert query["right"] == ["Rome"]


def test_prompts_longer_than_the_model_takes_are_refused_before_an_engine_starts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["holes", "--quick", "--inflate", "20"])
    with pytest.raises(SystemExit):
        holes.main()
    assert re.search(r"tokens with its answer, and .* takes 2304: ask for less with --inflate", capsys.readouterr().err)
