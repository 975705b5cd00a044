"""The expected time to the first token is what was measured, for prompts like those that were measured."""

import re
from pathlib import Path

import pytest

from blendhub.tools.analysis import tallies as first_token

MEASURED = Path(__file__).parent.parent.parent / "docs" / "measurements.md"


def measured(beginning: str) -> float:
    text = MEASURED.read_text(encoding="utf-8")
    (value,) = re.findall(rf"^\| {re.escape(beginning)}[^|]*\| ([\d.]+) x", text, re.M)
    return float(value)


def test_the_ratios_are_those_in_the_document():
    assert first_token.PROMPT == 3830
    assert measured("exact prefix, all but the question, by full prefill") == first_token.EXACT
    assert measured("15% recomputed by the default selector (`combined`)") == first_token.MOVED


def test_the_measured_prompts_take_as_long_as_measured():
    n, question = first_token.PROMPT, first_token.QUESTION
    documents = first_token.DOCUMENTS * first_token.DOCUMENT
    costs = first_token.MEASURED
    assert costs.ratio(n, n - question, 0) == pytest.approx(first_token.EXACT)
    assert costs.ratio(n, 0, documents) == pytest.approx(first_token.MOVED)
    assert costs.ratio(n, 0, 0) == 1


def test_quantiles_of_ratios():
    ratios = first_token.Ratios()
    assert ratios.quantile(0.5) == 1
    for number in range(1, 101):
        ratios.add(number / 100)
    assert (ratios.quantile(0.5), ratios.quantile(0.9), ratios.quantile(1)) == (0.5, 0.9, 1)
