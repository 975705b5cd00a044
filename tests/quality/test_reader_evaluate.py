"""Partial reuse and full prefill compute the same things of a prompt."""

import random

import pytest
import torch

from benchmarks.quality.reader.evaluate import KV, accuracy, blended, compute, stored
from benchmarks.quality.reader.model import load
from benchmarks.quality.reader.task import Shape, make_prompt

SHORT = Shape((2, 4), (25, 60), (0, 1000), (1, 3), (1, 2), (0, 1))
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def reader():
    return load()


@pytest.fixture(scope="module")
def prompts():
    return [make_prompt(seed, "test", SHORT) for seed in range(6)]


def tokens_of(prompt):
    return [*prompt.header, *(token for document in prompt.documents for token in document)]


def same(one: KV, other: KV) -> bool:
    return torch.allclose(one.keys, other.keys, **CLOSE) and torch.allclose(one.values, other.values, **CLOSE)


def test_everything_computed_anew_is_the_whole_prompt(reader, prompts):
    for prompt in prompts:
        kv = stored(reader, prompt, [[*prompt.header, 5, 4]] * len(prompt.documents))
        anew = [set(range(len(document))) for document in prompt.documents]
        assert same(blended(reader, prompt, kv, anew), compute(reader, tokens_of(prompt)))


def test_nothing_computed_anew_is_what_was_stored(reader, prompts):
    prompt = prompts[0]
    kv = stored(reader, prompt, [[*prompt.header, 5, 4]] * len(prompt.documents))
    blend = blended(reader, prompt, kv, [set()] * len(prompt.documents))
    begin = len(prompt.header)
    for document in kv:
        end = begin + document.keys.shape[2]
        assert torch.equal(blend.keys[:, :, begin:end], document.keys)
        begin = end
    assert not same(blend, compute(reader, tokens_of(prompt)))


def test_a_document_stored_behind_its_own_context_costs_nothing(reader, prompts):
    prompt = prompts[0]
    before, here = [], list(prompt.header)
    for document in prompt.documents:
        before.append(list(here))
        here += document
    kv = stored(reader, prompt, before)
    assert same(blended(reader, prompt, kv, [set()] * len(kv)), compute(reader, tokens_of(prompt)))


def test_any_tokens_computed_anew_between_right_ones_are_right(reader, prompts):
    prompt = prompts[1]
    whole = compute(reader, tokens_of(prompt))
    fresh = random.Random(0).sample(range(1, whole.keys.shape[2]), 20)
    assert same(compute(reader, tokens_of(prompt), whole, sorted(fresh)), whole)


def test_accuracy_counts_every_stratum(reader, prompts):
    shares = accuracy(reader, prompts, "foreign")
    assert set(shares) == {question.stratum for prompt in prompts for question in prompt.questions}
    assert all(0 <= share <= 1 for share in shares.values())
