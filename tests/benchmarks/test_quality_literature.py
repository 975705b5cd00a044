"""The rules of the literature, on the shipped reader: with everything computed they equal full prefill."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the reader is computed with it; `make setup` installs it")

import torch

from benchmarks.quality import reader_cases
from benchmarks.quality.literature import FILTERS, WINDOW_TOKENS, Literature, attended, gradual
from benchmarks.quality.reader.evaluate import blended, compute, placed, stored
from benchmarks.quality.reader.export import load
from benchmarks.quality.reader.task import make_prompt
from benchmarks.quality.workload import make_visits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reader():
    return load()


@pytest.fixture(scope="module")
def known(reader):
    """A prompt, and the KV of its documents as computed alone."""
    prompt = make_prompt(3, "test")
    with torch.inference_mode():
        return prompt, stored(reader, prompt, [[1]] * len(prompt.documents))


@torch.inference_mode()
def test_gradual_keeps_what_deviates_and_spends_what_it_says(reader, known):
    prompt, kv = known
    tokens = [*prompt.header, *(token for one in prompt.documents for token in one)]
    whole, share = gradual(reader, prompt, placed(prompt, kv), 1.0)
    expected = compute(reader, tokens)
    assert share == 1 and torch.allclose(whole.keys, expected.keys, atol=1e-4)
    some, share = gradual(reader, prompt, placed(prompt, kv), 0.1)
    layers = len(reader.layers)
    assert share == pytest.approx(
        (1 + sum(0.1 ** (n / 4) for n in (1, 2, 3)) + (layers - FILTERS) * 0.1) / layers, 0.01
    )
    header = len(prompt.header)
    fresh = (some.values != placed(prompt, kv).values).any(3).any(1)[:, header:].float().mean(1)
    assert fresh[1] == 1 and fresh[-1] == pytest.approx(0.1, abs=0.01)
    # What stayed to the end is what deviates most where the last tokens were left out.
    deviation = (expected.values - placed(prompt, kv).values).square().sum((1, 3))[FILTERS, header:]
    kept = (some.values != placed(prompt, kv).values).any(3).any(1)[-1, header:]
    assert deviation[kept].mean() > 2 * deviation[~kept].mean()


@torch.inference_mode()
def test_asked_takes_what_the_question_attends_to(reader, known):
    prompt, kv = known
    stale = blended(reader, prompt, kv, [set() for _ in kv])
    begin, n = len(prompt.header), sum(map(len, prompt.documents))
    plain = [one for one in prompt.questions if one.stratum == "plain"]
    found = 0
    for question in plain:
        chosen = attended(reader, stale, question.tokens, begin, 0.05)
        assert not chosen[:begin].any() and n * 0.05 - WINDOW_TOKENS < chosen.sum() <= n * 0.05 + 1
        body = np.array([*prompt.header, *(token for one in prompt.documents for token in one)])
        found += question.answer in body[chosen]
    assert found > 0.8 * len(plain)


def test_with_everything_computed_both_answer_rightly(reader):
    made = list(reader_cases.make_prompts(4, 1))
    prompts, cases = [prompt for prompt, _ in made], [case for _, case in made]
    literature = Literature(reader, prompts, cases, make_visits(cases, reader_cases.headers(1), 2048, 1))
    by_gradual, by_asked = literature.outcomes([1.0], lambda those, _: iter(those))
    assert by_gradual.scores == by_asked.scores and by_gradual.recomputed == by_asked.recomputed == [1.0] * len(cases)
    assert np.sum(by_gradual.scores) > 0.9 * np.sum(by_gradual.asked)
