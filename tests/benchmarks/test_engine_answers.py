"""Both benchmarks of answers from begin to end, with small random models: what they report is nonsense, but whole."""

import json
from operator import le

import pytest

pytest.importorskip("vllm", reason="the benchmark serves with vLLM; `make setup` installs it")

from benchmarks.holes.__main__ import COLUMNS, measure
from benchmarks.holes.order import with_holes
from benchmarks.holes.passes import PHASES, Procedure, rows
from benchmarks.quality import reader_run, report, text_run
from benchmarks.quality.compared import SELECTORS
from benchmarks.quality.measure import Answering
from benchmarks.quality.rows import rows_of_reader, rows_of_texts
from benchmarks.quality.text_cases import Writer
from blendhub.advice.questions import read_questions
from engine_harness.tiny_model import make_tiny_model
from tests.benchmarks.word_model import WORDS, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
COMPARED = [one for one in SELECTORS if one.label in ("combined", "first_k")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), **SMALL)
    return str(make_tokenizer(folder))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three questions to four documents of a hundred words each, all different."""
    words = list(WORDS)[3:]
    entries = []
    for number in range(3):
        texts = [[words[(n * n * (7 * number + 3 * at + 1) + n) % len(words)] for n in range(100)] for at in range(4)]
        entries.append({"question": "Where ?", "answer": "Rome", "documents": [" ".join(text) for text in texts]})
    file = tmp_path_factory.mktemp("data") / "data.json"
    file.write_text(json.dumps(entries))
    return file


def test_the_reader_is_asked_in_every_way(tmp_path):
    checkpoint = make_tiny_model(tmp_path / "model", vocab_size=400, **SMALL)
    outcomes = list(reader_run.run(checkpoint, reader_run.Size(2, 1, (0.15,)), COMPARED))
    ways = {(one.selector, one.state, one.ratio) for one in outcomes}
    assert {("full", "", 1.0), ("reuse", "", 0.0), ("oracle", "", 0.15), ("first_k", "", 0.15)} <= ways
    assert {("combined", state, 0.15) for state in ("cold", "cold, settled", "warm", "warm, settled")} <= ways
    assert {state for _, state, _ in ways} >= {f"hole {which}" for which in ("first", "middle", "last")}
    by_way = {one.key: one for one in outcomes}
    assert 0.14 < by_way["first_k", "", 0.15].recomputed[0] <= 0.16
    assert all(sum(map(sum, one.asked)) == 14 for one in outcomes if not one.state.startswith("hole"))
    found = reader_run.found(outcomes)
    report.write(found, rows_of_reader(found, ["first_k"]), tmp_path / "out", tmp_path / "out" / "report.json")
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["id"] for row in written["rows"]} >= {"recovered_15", "hole_15", "first_k_15", "full_plain"}
    assert len(written["details"]) == len(outcomes)
    assert all((tmp_path / "out" / name).stat().st_size > 1000 for name in ("by_compute.png", "by_time.png"))


def test_any_model_and_file_of_questions_are_measured_alike(model, data, tmp_path):
    found = text_run.found(list(text_run.run(model, data, None, True, COMPARED)))
    assert [len(one.scores) for one in found.all.values()] == [3] * len(found.all)
    warm = found.get("combined", 0.15)
    assert warm.state == "warm" and 0 < sum(warm.recomputed) / 3 <= 0.16
    report.write(found, rows_of_texts(found), tmp_path, tmp_path / "report.json")
    assert "| combined warm |" in (tmp_path / "report.md").read_text()


def test_a_hole_is_filled_in_the_first_pass_and_reused_in_the_second(model, data):
    from transformers import AutoTokenizer

    writer = Writer(AutoTokenizer.from_pretrained(model), COLUMNS)
    prompts = [with_holes(writer.case(one), [], [0], [1]) for one in read_questions(data)]
    found = {}
    for method, submit in (("blend", "all"), ("contiguous", "one")):
        procedure = Procedure(method, 0.3, submit, Answering(8, writer.stop))
        ((first, second),) = found[method] = measure(model, prompts, procedure, 1, "first_k", {})
        assert 0 < first.hit_rate < second.hit_rate
        assert second.phase_s["lookup"] > 0 and second.phase_s["load"] > 0 and second.phase_s["recompute"] > 0
        assert first.phase_s["save"] > 0
        assert all(map(le, first.first_token_s, first.ended_s)) and min(second.between_tokens_s) > 0
        ids = {row.id for row in rows(found[method], len(prompts))}
        assert ids >= {f"pass_{number}_{name}" for number in (1, 2) for name in ("f1", "tbt", "e2e", *PHASES)}
    # The hole is the second document: without holes only the first one is reused.
    assert found["contiguous"][0][0].hit_rate < 0.5 < found["blend"][0][0].hit_rate
