"""The benchmark of holes: where they stand, what is computed before, what may be asked, and what is reported."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

from benchmarks.holes import __main__ as holes
from benchmarks.holes.figures import FIGURES, Answered, Measured, Pass, rows
from benchmarks.holes.passes import Way, ways_of
from benchmarks.holes.presets import OWN, PRESETS, PUBLISHED
from benchmarks.holes.prompts import Query, before, make_prompts
from benchmarks.holes.scores import f1, rouge_l
from benchmarks.quality import serving
from harness.engines.tiny_model import make_tiny_model
from harness.engines.words import add_tokenizer, numbered

PAGE = Path(__file__).parents[2] / "benchmarks" / "holes" / "README.md"
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}


def query(number, documents=4):
    return Query([0], [[100 * number + n] for n in range(documents)], [9], ["five"])


def documents(prompt):
    return [token for (token,) in prompt.documents]


@pytest.mark.parametrize(
    "ids, positions, expected",
    [
        ([], [], [100, 101, 102, 103]),
        ([3], [0], [103, 100, 101, 102]),
        ([3, 1], [0, "middle"], [103, 100, 101, 102]),
        (["middle"], ["last"], [100, 101, 103, 102]),
        ([0, 1], [1, 0], [101, 100, 102, 103]),
    ],
)
def test_holes_stand_where_they_are_asked_for_and_the_others_keep_their_order(ids, positions, expected):
    (prompt,) = prompts = make_prompts([query(1)], ids, positions, separator=[7])
    assert documents(prompt) == expected
    assert prompt.tokens == [0, 7, *(token for one in expected for token in (one, 7)), 9]
    numbers = {{"middle": 2}.get(place, place) for place in ids}
    assert before(prompts) == [[0, 7], *([token, 7] for token in expected if token - 100 not in numbers)]


@pytest.mark.parametrize(
    "ids, positions, complaint",
    [
        ([1], [], "1 hole ids and 0 hole positions"),
        ([4], [0], "hole ids of query 0: 4 is out of range; there are 4 documents, so 0 to 3"),
        ([0], [6], "hole positions of query 0: 6 is out of range; there are 6 documents, so 0 to 5"),
        ([1, 1], [0, 2], "hole ids of query 0: 1 1 name one of 4 documents twice"),
    ],
)
def test_holes_that_the_prompt_cannot_have_are_refused(ids, positions, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_prompts([query(1), query(2)], ids, positions, inflate=2)


def test_documents_of_other_queries_make_the_prompt_longer_in_turn_or_the_same_behind_all():
    queries = [query(1), query(2), query(3, 2)]

    def others(at, inflate, order):
        return documents(make_prompts(queries, [], [], inflate, order=order)[at])[len(queries[at].documents) :]

    assert [others(at, 4, "turns") for at in (0, 1)] == [[200, 300, 201, 301], [300, 100, 301, 101]]
    assert [others(at, 3, "same") for at in (0, 1, 2)] == [[200, 201, 202], [100, 101, 102], [100, 101, 102]]
    with pytest.raises(ValueError, match=r"9 documents .* but query 0 finds 6 that are no holes; ask for fewer"):
        make_prompts(queries, [], [], 9)


@pytest.mark.parametrize("order", ["turns", "same"])
def test_no_hole_of_any_query_is_computed_before(order):
    """Documents that were borrowed were holes of other queries, and phase 1 filled all of them."""
    queries = [query(number, 9) for number in range(1, 31)]
    prompts = make_prompts(queries, [0], [0], inflate=20, order=order)
    computed = {tuple(unit) for unit in before(prompts)}
    holes = {text for prompt in prompts for text in prompt.missing}
    assert len(holes) == 30 and not holes & computed
    # Nor does another query have it as a document that should be stored.
    for prompt in prompts:
        stored = [tuple(text) for number, text in enumerate(prompt.documents) if number not in prompt.holes]
        assert len(stored) == 28 and computed.issuperset(stored)


@pytest.mark.parametrize(
    "answer, right, expected",
    [
        ("The Italy!", ["italy"], (1, 2 / 3)),
        ("b a x", ["a b", "x y z"], (2 / 3, 0.4)),
        ("Rome", ["Italy", "Rome"], (1, 1)),
        ("", ["Italy"], (0, 0)),
        ("Italy", [], (0, 0)),
    ],
)
def test_scores(answer, right, expected):
    assert (f1(answer, right), rouge_l(answer, right)) == pytest.approx(expected)


def test_each_method_is_a_way_to_ask_and_ratios_make_ways_where_they_matter():
    ways = ways_of(["full", "blend", "contiguous", "reuse"], [0.15, 0.3])
    assert [way.label for way in ways] == ["full", "blend_15", "blend_30", "contiguous_15", "contiguous_30", "reuse"]
    assert Way("reuse", 0.3).request() == {
        "mode": "blend", "recompute_ratio": 0.0, "settled": False, "cache_salt": "reuse"
    }  # fmt: skip
    assert Way("full", 0.3).request() == {"mode": "off", "store": False, "cache_salt": "full"}


def measured(reused, hole, first_token_s):
    queries = [Answered(0.5, 0, 10, reused + n, 1, hole + n, first_token_s * n, n, n / 10, "", []) for n in range(3)]
    return Pass(queries, 2, dict.fromkeys(("lookup", "load", "probe", "recompute", "save"), 3.0), 6.0)


def test_rows_are_shares_of_all_prompts_the_greatest_of_one_and_times_beside_full_prefill():
    results = {"blend_15": Measured(5.0, [measured(4, 2, 0.1)]), "full": Measured(0.0, [measured(0, 0, 0.4)])}
    values = {row.id: row.value for row in rows(results)}
    expected = {"hit_rate": 0.5, "computed": 0.6, "in_holes": 0.3, "most_reused": 0.6, "largest_hole": 0.4}
    expected |= {"with_holes": 2 / 3, "e2e": 1.0, "a_query": 2.0, "load": 1.0, "ttft_by_full": 0.25}
    assert {id: values[f"blend_15_pass_1_{id}"] for id in expected} == pytest.approx(expected)
    assert values["blend_15_before"] == 5.0


def test_presets_are_options_that_can_be_asked_and_the_command_line_wins():
    queries = [query(number, 9) for number in range(1, 10)]
    defaults = vars(holes.parsed([])[1])
    for name, preset in PRESETS.items():
        assert preset.keys() <= defaults.keys()
        _, options = holes.parsed(["--preset", name, "--passes", "3"])
        assert options.passes == 3 and all(getattr(options, option) == value for option, value in preset.items())
        places = options.hole_ids, options.hole_positions
        assert make_prompts(queries, *places, options.inflate, order=options.inflate_order)


def test_every_preset_is_documented():
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M) == [*PUBLISHED]
    assert all(f"--preset {name}" in PAGE.read_text() for name in OWN)


@pytest.mark.parametrize(
    "said, complaint",
    [
        ("--inflate -1", "argument --inflate: expected a number of 0 or more, got '-1'"),
        ("--recompute-ratio 1.5", "argument --recompute-ratio: expected a number from 0 to 1, got '1.5'"),
        ("--hole-ids second", "argument --hole-ids: expected a number, or first, middle, last, got 'second'"),
        ("--data file", "--model and --data belong together"),
    ],
)
def test_what_cannot_be_asked_is_refused(capsys, said, complaint):
    with pytest.raises(SystemExit):
        holes.parsed(said.split())
    assert complaint in capsys.readouterr().err


def test_no_benchmark_audits_and_an_accelerator_chooses_its_blocks_and_dtype(tmp_path, monkeypatch):
    """An audit, and a repair, take as long as a prefill."""
    torch = pytest.importorskip("torch", reason="engines need torch; `make setup` installs it")
    pytest.importorskip("vllm", reason="the benchmarks serve with vLLM; `make setup` installs it")
    from benchmarks import agents, ttft
    from benchmarks.load import __main__ as load

    model, prompts = str(make_tiny_model(tmp_path, **SMALL)), make_prompts([query(1)], [], [])
    _, options = holes.parsed(["--chunk-size", "64", "--tp-size", "2"])
    settings, engine = holes.engine_arguments(model, prompts, 1, options)
    for without_audits in (settings, agents.SETTINGS, load.SETTINGS, serving.SETTINGS, ttft.settings()):
        assert (without_audits["audit_share"], without_audits["repair"]) == (0, "off")
    assert settings["chunk_tokens"] == 64
    assert (engine["block_size"], engine["dtype"], engine["tensor_parallel_size"]) == (32, "float32", 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    _, engine = holes.engine_arguments(model, prompts, 1, options)
    assert (engine["block_size"], engine["dtype"]) == (None, "auto")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hole_is_filled_in_the_first_pass_and_reused_in_the_second(tmp_path, monkeypatch):
    """With a small random model: its answers are nonsense, but whole."""
    pytest.importorskip("vllm", reason="the benchmark serves with vLLM; `make setup` installs it")
    model = make_tiny_model(tmp_path / "model", **SMALL)
    add_tokenizer(model, numbered(1000))
    entries = []
    for number in range(6):
        texts = [random.Random(f"{number} {at}").choices([f"w{n}" for n in range(2, 1000)], k=100) for at in range(4)]
        entries.append({"question": "w5", "answer": "w7", "documents": [" ".join(text) for text in texts]})
    (tmp_path / "data.json").write_text(json.dumps(entries))
    said = "--quick --hole-ids first --hole-positions 1 --inflate 1 --separator w9 --method blend contiguous"
    said += f" --selector first_k --recompute-ratio 0.3 --model {model} --data {tmp_path}/data.json --at-once all"
    monkeypatch.setattr(sys, "argv", ["holes", *said.split(), "--json", f"{tmp_path}/holes.json"])
    holes.main()
    written = json.loads((tmp_path / "holes.json").read_text())
    values = {row["id"]: row["value"] for row in written["rows"]}
    ways = ("blend_30", "contiguous_30")
    assert values.keys() == {f"{way}_before" for way in ways} | {
        f"{way}_pass_{number}_{name}" for way in ways for number in (1, 2) for name in FIGURES
    }
    for way in ways:
        assert 0 < values[f"{way}_pass_1_hit_rate"] < values[f"{way}_pass_2_hit_rate"]
        assert all(values[f"{way}_pass_2_{phase}"] > 0 for phase in ("lookup", "load", "recompute"))
        assert values[f"{way}_pass_1_save"] > 0 < values[f"{way}_before"]
    # The hole is the second document: without holes only the first one is reused.
    assert values["contiguous_30_pass_1_hit_rate"] < 0.5 < values["blend_30_pass_1_hit_rate"]
    assert (values["blend_30_pass_1_with_holes"], values["contiguous_30_pass_1_with_holes"]) == (1.0, 0)
    # What is not stored behind the first pass are a few tokens at the end of some prompt's hole.
    assert values["blend_30_pass_2_in_holes"] < 0.01 < 0.15 < values["blend_30_pass_1_in_holes"] < 0.25
    assert len(written["details"]["blend_30"]["passes"][0]["queries"]) == 4
