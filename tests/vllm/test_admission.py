"""Which requests take part, in which namespace, and how far: on vLLM's own requests."""

import logging
from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from blendhub.core.layout import KVLayout, Namespace, Variant
from blendhub.vllm.messages import LoadedAdapter
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.plugin import register
from blendhub.vllm.scheduler.admission import Admission, text_end
from blendhub.vllm.settings import NOWHERE, Settings

register()
LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float32")
BASE = Namespace(model="m", layout=LAYOUT)
BLENDS = ModelSupport((LAYOUT,), True, ())
EXACT_ONLY = ModelSupport((LAYOUT,), False, ("keys cannot be moved",))
PROMPT = list(range(40))


def admission(role: Any = "kv_both", support: ModelSupport = BLENDS, **settings) -> Admission:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="BlendHubConnector", kv_role=role))
    return Admission(config, Settings(**settings), support, BASE)


def request(asked: dict | None = None, prompt: list[int] | None = PROMPT, **facts) -> Request:
    extra = {"kv_transfer_params": {"blendhub": asked}} if asked is not None else None
    return Request("r", prompt, SamplingParams(max_tokens=1, extra_args=extra), None, **facts)


def image(at: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(data=None, modality="image", identifier="i", mm_position=PlaceholderRange(at, 4))


def pooling() -> Request:
    return Request("r", PROMPT, None, PoolingParams(task="embed"))


@pytest.mark.parametrize(
    "role, code, stores", [("kv_both", None, True), ("kv_producer", "role", True), ("kv_consumer", None, False)]
)
def test_kv_role_decides_whether_a_request_reads_and_stores(role, code, stores):
    terms, refusal = admission(role).admit(request())
    assert (refusal.why if refusal else None) == code
    assert terms.stores is stores


@pytest.mark.parametrize("given", ["blend", "contiguous", "exact", "off"])
@pytest.mark.parametrize("asked", [None, "blend", "contiguous", "exact", "off"])
def test_a_request_s_mode_overrides_the_engine_s(given, asked):
    terms, refusal = admission(mode=given).admit(request({"mode": asked} if asked else None))
    wanted = asked or given
    assert terms.mode == wanted
    assert (refusal is not None) == (wanted == "off")
    assert terms.stores
    if wanted == "off":
        assert refusal.why == "off"
        assert refusal.reason == ("mode is off for this request" if asked else "mode is off")


@pytest.mark.parametrize("asked, ratio", [({}, 0.4), ({"recompute_ratio": 0}, 0.0), ({"recompute_ratio": 1.0}, 1.0)])
def test_a_request_s_ratio_overrides_the_engine_s_and_both_may_forbid_to_store_it(asked, ratio):
    for engine, stores in ((True, True), (True, False), (False, True)):
        terms, _ = admission(recompute_ratio=0.4, store=engine).admit(request(asked | {"store": stores}))
        assert (terms.ratio, terms.stores) == (ratio, engine and stores)


@pytest.mark.parametrize("asked", [{"mode": "fast"}, {"recompute_ratio": 2}, {"mood": "off"}, ["blend"], "off"])
def test_invalid_parameters_of_a_request_are_named_and_end_its_reuse(asked):
    terms, refusal = admission().admit(request(asked))
    assert refusal.why == "bad_request" and "kv_transfer_params.blendhub" in refusal.reason
    assert not terms.stores and not terms.settles


def test_keys_of_other_connectors_are_logged_once_each(caplog):
    made = admission()
    with caplog.at_level(logging.WARNING, logger="blendhub"):
        for number in range(100):
            given = {"remote_host": "h", f"word-{number}": 1, "blendhub": {"mode": "exact"}}
            params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": given})
            assert made.admit(Request("r", PROMPT, params, None))[1] is None
    assert sum("has the key 'remote_host'; BlendHub reads only 'blendhub'" in line for line in caplog.messages) == 1
    assert len(caplog.messages) <= 40, "clients can fill the log"


@pytest.mark.parametrize(
    "unsupported, reason",
    [
        (
            request(mm_features=[image(20), image(0)]),
            "the prompt begins with an image, sound or video, and only text before the first of them is reused",
        ),
        (request(prompt=None, prompt_embeds=torch.zeros(40, 8)), "prompts given as embeddings are not supported"),
        (
            request(prompt_embeds=torch.zeros(40, 8), prompt_is_token_ids=[True] * 39 + [False]),
            "prompts given as embeddings are not supported",
        ),
        (pooling(), "pooling requests are not supported"),
        (request(resumable=True), "prompts whose parts come one after the other are not supported"),
    ],
    ids=["image", "embeddings", "embeddings_and_tokens", "pooling", "streamed"],
)
def test_requests_whose_kv_does_not_follow_from_token_ids_are_neither_reused_nor_stored(unsupported, reason):
    terms, refusal = admission().admit(unsupported)
    assert (refusal.why, refusal.reason) == ("request", reason)
    assert not terms.stores


def test_a_prompt_with_images_takes_part_up_to_the_first():
    with_images = request(mm_features=[image(30), image(20)])
    terms, refusal = admission().admit(with_images)
    assert refusal is None and terms.stores and terms.mode == "blend"
    assert text_end(with_images) == 20 and text_end(request()) is None


def test_a_model_whose_keys_cannot_be_moved_is_served_with_exact_reuse():
    made = admission(support=EXACT_ONLY)
    assert made.admit(request())[0].mode == "exact"
    assert made.admit(request({"mode": "blend"}))[0].mode == "exact"
    assert made.admit(request({"mode": "contiguous"}))[0].mode == "exact"
    assert made.admit(request({"mode": "off"}))[0].mode == "off"
    assert not made.admit(request())[0].fills_holes
    assert admission().admit(request())[0].fills_holes


def test_a_request_with_an_adapter_has_the_namespace_of_the_loaded_weights_and_exact_reuse():
    made, variants = admission(), []
    adapters = {"one": LoRARequest("one", 1, "org/a"), "two": LoRARequest("two", 2, "org/a")}
    made.adapters.report({0: {1: LoadedAdapter("weights", 4), 2: LoadedAdapter("others", 4)}})
    for name in ("one", "one", "two"):
        terms, refusal = made.admit(request(lora_request=adapters[name]))
        assert refusal is None and terms.stores and terms.mode == "exact"
        assert not made.admit(request(lora_request=adapters[name]))[0].fills_holes
        variants.append(terms.variant)
    assert variants[0] == variants[1] and len({*variants, Variant()}) == 3
    # Other weights get the id of the first, which vLLM drops later.
    made.adapters.report({0: {1: LoadedAdapter("third", 9), 2: LoadedAdapter("others", 4)}})
    assert made.admit(request(lora_request=adapters["one"]))[0].variant not in variants
    made.adapters.report({0: {2: LoadedAdapter("others", 4)}})
    terms, refusal = made.admit(request(lora_request=adapters["one"]))
    assert refusal.why == "adapter" and "--max-cpu-loras" in refusal.reason and terms.adapter is None


def test_an_adapter_that_vllm_reads_anew_for_each_step_is_not_reused():
    made = admission()
    made.adapters.report({0: {1: LoadedAdapter("weights", 4)}})
    terms, refusal = made.admit(request(lora_request=LoRARequest("one", 1, "org/a", load_inplace=True)))
    assert refusal.why == "adapter" and "load_inplace" in refusal.reason and terms.stores
    assert terms.adapter is None, "the report is of what was loaded before"


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"approximate_from": 32}, 32),
        ({"engine_tokens": 0, "moved_tokens": 8, "approximate_from": 32}, 32),
        ({"engine_tokens": 0, "moved_tokens": 0}, NOWHERE),
        ({"reason": "the model is served without reuse"}, NOWHERE),
        ({"mode": "blend"}, 0),
        (None, 0),
    ],
    ids=["said", "reported", "all exact", "no reuse", "not said", "no report"],
)
def test_what_another_engine_has_computed_is_not_looked_up_and_blended_from_where_its_report_says(given, expected):
    params = {"do_remote_prefill": True, "remote_engine_id": "e"} | ({} if given is None else {"blendhub": given})
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    terms, refusal = admission().admit(Request("r", PROMPT, sampling, None))
    assert refusal.why == "other_connector" and terms.stores and terms.received_from == expected
    params["do_remote_prefill"] = False
    terms, refusal = admission().admit(Request("r", PROMPT, sampling, None))
    assert refusal is None and terms.received_from is None
