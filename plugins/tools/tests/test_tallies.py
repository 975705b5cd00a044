"""Counts in bounded memory, and times that are those that were measured."""

import re
from pathlib import Path

import pytest
from blendhub_tools.analysis import tallies
from blendhub_tools.analysis.lines import MOST_NAMED, MOST_REASONS, BrokenLines, Place
from blendhub_tools.analysis.tokenizing import kv_bytes_of


def test_broken_lines_of_any_number_take_bounded_memory():
    broken = BrokenLines()
    for number in range(10_000):
        broken.note(Place("log", number), f"reason {number}")
    assert len(broken) == 10_000 and len(broken.reasons) <= MOST_REASONS + 1 and len(broken.named) == MOST_NAMED
    assert broken.reasons["other reasons"] == 10_000 - MOST_REASONS


@pytest.mark.parametrize(
    "config, expected",
    [
        ('{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}', 131072),
        ('{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "torch_dtype": "float32"}', 2048),
        ('{"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}}', 32),
        ('{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}', 61 * 576 * 2),
        ('{"model_type": "unknown"}', None),
        ("[]", None),
        ("", None),
    ],
)
def test_the_kv_of_a_token_by_the_model_s_config(tmp_path, config, expected):
    file = tmp_path / "config.json"
    file.write_text(config)
    assert kv_bytes_of(file) == expected
    assert kv_bytes_of(tmp_path / "missing") is None


MEASUREMENTS = Path(__file__).parents[3] / "docs" / "measurements.md"


def measured(beginning: str) -> float:
    text = MEASUREMENTS.read_text(encoding="utf-8")
    (value,) = re.findall(rf"^\| {re.escape(beginning)}[^|]*\| ([\d.]+) x", text, re.M)
    return float(value)


def test_the_ratios_are_those_in_the_document():
    assert tallies.PROMPT == 3830
    assert measured("exact prefix, all but the question, relative to full prefill") == tallies.EXACT
    assert measured("15% recomputed by the default selector (`attended`)") == tallies.MOVED
    told, costs = " ".join((MEASUREMENTS.parent / "analyze.md").read_text(encoding="utf-8").split()), tallies.MEASURED
    assert f"An exact token costs {costs.exact:.0%} of a computed token, and a moved token {costs.moved:.0%}" in told


def test_the_measured_prompts_take_as_long_as_measured():
    n, question = tallies.PROMPT, tallies.QUESTION
    documents = tallies.DOCUMENTS * tallies.DOCUMENT
    costs = tallies.MEASURED
    assert costs.ratio(n, n - question, 0) == pytest.approx(tallies.EXACT)
    assert costs.ratio(n, 0, documents) == pytest.approx(tallies.MOVED)
    assert costs.ratio(n, 0, 0) == 1


def test_quantiles_of_ratios():
    ratios = tallies.Ratios()
    assert ratios.quantile(0.5) == 1
    for number in range(1, 101):
        ratios.add(number / 100)
    assert (ratios.quantile(0.5), ratios.quantile(0.9), ratios.quantile(1)) == (0.5, 0.9, 1)
