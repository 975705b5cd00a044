"""Blending while vLLM speculates: answers are those without speculation, and proposals are accepted as before."""

import importlib.util
import json
from typing import Any

import pytest

from harness.engines import Engine
from harness.engines.tiny_model import make_tiny_model
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


def model_with_a_head(folder):
    """A model of one layer (MiMo) whose MTP head has the same layer, and takes the token: it proposes what the model
    says, as far as it attends to the same text.
    """
    import torch
    from safetensors.torch import load_file, save_file

    facts: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    make_tiny_model(folder, **facts, num_hidden_layers=1)
    found, weights = load_file(folder / "model.safetensors"), {}
    width = found["model.norm.weight"].numel()
    for name, weight in found.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            continue  # MiMo has none, so that the projections are larger
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = 2 * weight
        weights[name] = weight
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.replace("weight", "bias")] = torch.zeros(len(weight))
    head = "model.mtp_layers.0"
    weights |= {
        name.replace("model.layers.0", head): one.clone() for name, one in weights.items() if ".layers." in name
    }
    weights |= {f"{head}.{name}_layernorm.weight": torch.ones(width) for name in ("token", "hidden", "final")}
    weights[f"{head}.input_proj.weight"] = torch.cat([torch.zeros(width, width), torch.eye(width)], 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
        assert "draft model's KV of recomputed tokens is not computed" not in engine.log
    assert answer.tokens == expected.tokens


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_proposals_are_accepted_behind_blended_text_as_behind_computed_text(method, model, prompts, tmp_path):
    """The draft model is the model itself, and the MTP head has the model's only layer: both propose what it says."""
    first, blended = prompts
    if method == "mtp":
        model = model_with_a_head(tmp_path / "model")
    with Engine(model, SETTINGS, async_scheduling=False) as engine:
        engine.one(first)
        expected = engine.one(blended, tokens=24)
    speculation = {"method": method, "num_speculative_tokens": PROPOSED}
    if method == "draft_model":
        speculation["model"] = str(model)
    with speculating(model, speculation) as engine:

        def accepted(*given, **asked):
            answer = engine.one(*given, tokens=24, **asked)
            counts = engine.call("inside", "tests.vllm.drafts:counts")
            return answer, counts["accepted"] / counts["drafted"]

        _, before = accepted(blended, mode="off", store=False)
        engine.forget()
        engine.one(first)
        engine.call("inside", "tests.vllm.drafts:counts")
        answer, behind = accepted(blended)
        assert answer.report["moved_tokens"] >= 256 and answer.tokens == expected.tokens
        # vLLM's third proposal of an MTP head of one layer is never that of its model.
        assert before > (0.6 if method == "mtp" else 0.9) and behind >= 0.9 * before
        engine.forget()
        # What is loaded exactly has the draft model's KV, too.
        answer, behind = accepted([*first, *blended[-30:]])
        assert answer.report["exact_tokens"] >= 320 and behind >= 0.9 * before
