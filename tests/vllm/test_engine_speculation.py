"""Blending while vLLM speculates: answers are those without speculation. Reused positions have no KV of a draft model,
so that fewer of its proposals are accepted behind them."""

import importlib.util
import json
from typing import Any

import pytest

from harness.engines import Engine
from tests.vllm.conftest import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROPOSED = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": PROPOSED, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": PROPOSED}
HEAD = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


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
    import numpy as np

    tokens = np.random.default_rng(32).integers(2, 1000, 800).tolist()
    first, lead, question = tokens[:330], tokens[330:460], tokens[460:520]
    # A text that repeats itself, for what proposes from the prompt.
    return first, [*lead, *first, *question, *question]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """The answer without speculation."""
    first, blended = prompts
    with Engine(model, SETTINGS, async_scheduling=False) as engine:
        engine.one(first)
        return engine.one(blended, tokens=24)


def speculating(model, speculation):
    arrange = ["tests.vllm.drafts:count_drafts"]
    return Engine(model, SETTINGS, arrange=arrange, async_scheduling=False, speculative_config=speculation)


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle", "eagle3", "eagle of another shape"])
def test_the_answer_behind_blended_text_is_that_without_speculation(model, prompts, expected, tmp_path, method):
    if method == "suffix" and not importlib.util.find_spec("arctic_inference"):
        pytest.skip("vLLM's suffix decoding needs arctic_inference, which `make setup` leaves out: docs/testing.md")
    first, blended = prompts
    if method == "eagle of another shape":
        speculation = head_of(tmp_path, "eagle", num_key_value_heads=4)
    else:
        speculation = {"ngram": NGRAM, "suffix": SUFFIX}.get(method) or head_of(tmp_path, method)
    with speculating(model, speculation) as engine:
        engine.one(first)
        answer = engine.one(blended, tokens=24)
        assert answer.report["moved_tokens"] >= 256 and "blends" not in answer.report.get("reason", "")
        assert engine.call("inside", "tests.vllm.drafts:counts")["drafted"] > 0
    assert answer.tokens == expected.tokens


def test_a_draft_model_s_kv_is_not_stored_and_answers_behind_reused_text_stay_the_same(model, prompts):
    """The draft model is the model itself: behind computed text it proposes what the model says."""
    first, blended = prompts
    exact = [*first, *blended[-30:]]
    with Engine(model, SETTINGS, async_scheduling=False) as engine:
        engine.one(first)
        expected = [engine.one(prompt, tokens=24) for prompt in (blended, exact)]
    speculation = {"method": "draft_model", "num_speculative_tokens": PROPOSED, "model": str(model)}
    with speculating(model, speculation) as engine:
        engine.one(blended, tokens=24, mode="off", store=False)
        counts = engine.call("inside", "tests.vllm.drafts:counts")
        assert counts["accepted"] > 0.9 * counts["drafted"]
        engine.forget()
        engine.one(first)
        answers = []
        for prompt in (blended, exact):
            engine.forget()
            answers.append(engine.one(prompt, tokens=24, store=False))
        assert answers[0].report["moved_tokens"] >= 256 and answers[1].report["exact_tokens"] >= 256
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
