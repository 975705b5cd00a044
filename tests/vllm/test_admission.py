"""Which requests take part, in which namespace, and how far: on vLLM's own requests."""

import logging
from typing import Any

import pytest
import torch
from vllm import PoolingParams, SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import NOWHERE
from blendhub.vllm.model_support import ModelSupport
from blendhub.vllm.plugin import register
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.settings import Settings

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


@pytest.mark.parametrize(
    "role, why, stores", [("kv_both", None, True), ("kv_producer", "role", True), ("kv_consumer", None, False)]
)
def test_kv_role_decides_whether_a_request_reads_and_stores(role, why, stores):
    terms, refusal = admission(role).admit(request())
    assert (refusal.code if refusal else None, terms.stores) == (why, stores)


@pytest.mark.parametrize("given", ["blend", "contiguous", "exact", "off"])
@pytest.mark.parametrize("asked", [None, "blend", "contiguous", "exact", "off"])
def test_a_request_s_mode_overrides_the_engine_s(given, asked):
    terms, refusal = admission(mode=given).admit(request({"mode": asked} if asked else None))
    wanted = asked or given
    assert terms.mode == wanted and terms.stores and terms.fills_holes == (wanted != "contiguous")
    if wanted == "off":
        assert (refusal.code, refusal.message) == ("off", "mode is off for this request" if asked else "mode is off")
    else:
        assert refusal is None
    # A model whose keys cannot be moved is served with exact reuse.
    terms, _ = admission(support=EXACT_ONLY, mode=given).admit(request({"mode": asked} if asked else None))
    assert terms.mode == ("off" if wanted == "off" else "exact") and not terms.fills_holes


def test_a_request_s_ratio_overrides_the_engine_s_and_both_may_forbid_to_store_it():
    for asked, ratio in (({}, 0.4), ({"recompute_ratio": 0}, 0.0), ({"recompute_ratio": 1.0}, 1.0)):
        for engine, stores in ((True, True), (True, False), (False, True)):
            terms, _ = admission(recompute_ratio=0.4, store=engine).admit(request(asked | {"store": stores}))
            assert (terms.ratio, terms.stores) == (ratio, engine and stores)


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
        (request(mm_features=[image(20), image(0)]), "the prompt begins with an image, sound or video"),
        (request(prompt=None, prompt_embeds=torch.zeros(40, 8)), "prompts given as embeddings"),
        (request(prompt_embeds=torch.zeros(40, 8), prompt_is_token_ids=[True] * 39 + [False]), "prompts given as"),
        (Request("r", PROMPT, None, PoolingParams(task="embed")), "pooling requests"),
        (request(resumable=True), "prompts whose parts come one after the other"),
    ],
)
def test_requests_whose_kv_does_not_follow_from_token_ids_are_neither_reused_nor_stored(unsupported, reason):
    terms, refusal = admission().admit(unsupported)
    assert refusal.code == "request" and refusal.message.startswith(reason) and not terms.stores


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
    assert refusal.code == "other_connector" and terms.stores and terms.received_from == expected
    params["do_remote_prefill"] = False
    terms, refusal = admission().admit(Request("r", PROMPT, sampling, None))
    assert refusal is None and terms.received_from is None
