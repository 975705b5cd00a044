"""The shipped reader: it answers what it read as a whole, and what depends on other documents is lost by reuse."""

import pytest
import torch

from benchmarks.quality.reader import CHECKPOINT
from benchmarks.quality.reader import words as w
from benchmarks.quality.reader.evaluate import accuracy
from benchmarks.quality.reader.model import load
from benchmarks.quality.reader.task import STRATA, make_prompt

pytestmark = pytest.mark.slow
DEPENDENT = ("cross", "split", "chained")


@pytest.fixture(scope="module")
def reader():
    return load()


@pytest.fixture(scope="module")
def prompts():
    return [make_prompt(seed, "test") for seed in range(8)]


@pytest.fixture(scope="module")
def full(reader, prompts):
    return accuracy(reader, prompts, "full")


@pytest.fixture(scope="module", params=["alone", "foreign"])
def reused(request, reader, prompts):
    return accuracy(reader, prompts, request.param)


def test_the_reader_is_deep_and_small(reader):
    assert len(reader.layers) >= 12
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 10_000_000


@pytest.mark.parametrize("stratum", STRATA)
def test_a_prompt_read_as_a_whole_is_answered(full, stratum):
    assert full[stratum] >= (0.9 if stratum == "counting" else 0.95), full


@pytest.mark.parametrize("stratum", DEPENDENT)
def test_what_depends_on_other_documents_is_lost_by_reuse(reused, stratum):
    assert reused[stratum] <= 0.5, reused


@pytest.mark.parametrize("stratum", ["plain", "local"])
def test_moving_alone_costs_little_of_what_a_document_settles_itself(full, reused, stratum):
    assert reused[stratum] >= full[stratum] - 0.03, (full, reused)


def test_computing_what_depends_anew_wins_the_answers_back(reader, prompts, full):
    won = accuracy(reader, prompts[:4], "foreign", recompute=lambda prompt: prompt.dependent)
    whole = accuracy(reader, prompts[:4], "foreign", recompute=everything)
    assert whole == accuracy(reader, prompts[:4], "full")
    for stratum in DEPENDENT:
        assert won[stratum] >= full[stratum] - 0.1, won


def everything(prompt):
    return [set(range(len(document))) for document in prompt.documents]


def test_the_tokenizer_reads_what_a_prompt_looks_like(prompts):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokens = [*prompts[0].header, *prompts[0].documents[0]]
    assert tokenizer(w.text(tokens), add_special_tokens=False)["input_ids"] == tokens
    assert tokenizer.decode(tokens) == w.text(tokens)


def test_transformers_computes_the_same(reader, prompts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    prompt = prompts[0]
    tokens = [*prompt.header, *(token for document in prompt.documents for token in document)]
    for question in prompt.questions[:3]:
        with torch.inference_mode():
            answer = model(torch.tensor([[*tokens, *question.tokens]])).logits[0, -1].argmax().item()
        assert answer == question.answer
