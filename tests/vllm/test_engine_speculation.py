"""Blending while vLLM speculates: answers are those without speculation. Reused positions have no KV of a draft model,
so that fewer of its proposals are accepted behind them."""

import importlib.util
import json
from typing import Any

import numpy as np
import pytest

from harness.engines import Engine
from harness.engines.shapes import LLAMA
from tests.vllm.arrangements import arrange, count_drafts, drafts, inside
from tests.vllm.conftest import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROPOSED = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": PROPOSED, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": PROPOSED}
HEAD = LLAMA | {"num_hidden_layers": 1, "rope_scaling": None}


def head_of(folder, method, **others):
    """A draft head with random weights, whose proposals are hardly ever accepted."""
    names = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
    facts: dict[str, Any] = {"architectures": [names[method]]}
    if method == "eagle3":  # vLLM's default layers are for models of more layers
        facts |= {"draft_vocab_size": 1000, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(HEAD | facts | others))
    return {
        "method": method,
        "model": str(folder),
        "num_speculative_tokens": PROPOSED,
        "draft_load_config": {"load_format": "dummy"},
    }


@pytest.fixture(scope="module")
def prompts():
    """A document, a prompt in which it is moved, and one that goes on behind it."""
    tokens = np.random.default_rng(32).integers(2, 1000, 800).tolist()
    document, lead, question = tokens[:330], tokens[330:460], tokens[460:520]
    # A text that repeats itself, for what proposes from the prompt.
    return document, [*lead, *document, *question, *question], [*document, *question[30:]]


def answers_of(engine, prompts):
    document, *asked = prompts
    engine.one(document)
    answers = []
    for prompt in asked:
        engine.forget()
        answers.append(engine.one(prompt, tokens=24, store=False))
    return answers


@pytest.fixture(scope="module")
def expected(model, prompts):
    """The answers without speculation."""
    with Engine(model, SETTINGS, async_scheduling=False) as engine:
        return answers_of(engine, prompts)


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle3", "eagle of another shape", "draft_model"])
def test_answers_behind_reused_text_are_those_without_speculation(model, prompts, expected, tmp_path, method):
    if method == "suffix" and not importlib.util.find_spec("arctic_inference"):
        pytest.skip("vLLM's suffix decoding needs arctic_inference, which `make setup` leaves out: docs/testing.md")
    if method == "eagle of another shape":
        speculation = head_of(tmp_path, "eagle", num_key_value_heads=4)
    elif method == "draft_model":
        speculation = {"method": method, "num_speculative_tokens": PROPOSED, "model": str(model)}
    else:
        speculation = {"ngram": NGRAM, "suffix": SUFFIX}.get(method) or head_of(tmp_path, method)
    options = {"async_scheduling": False, "speculative_config": speculation}
    with Engine(model, SETTINGS, arrange=arrange(count_drafts), **options) as engine:
        if method == "draft_model":
            # It is the model itself: behind computed text it proposes what the model says.
            engine.one(prompts[1], tokens=24, mode="off", store=False)
            counts = inside(engine, drafts)
            assert counts["accepted"] > 0.9 * counts["drafted"]
            engine.forget()
        answers = answers_of(engine, prompts)
        assert inside(engine, drafts)["drafted"] > 0
    moved, exact = (answer.report for answer in answers)
    assert moved["moved_tokens"] >= 256 and exact["exact_tokens"] >= 256
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
