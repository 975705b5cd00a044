"""Which requests take part, in which namespace, and how far: on vLLM's own requests."""

import logging
import os

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the adapter's tests need vLLM; `make setup` installs it")

import torch
from vllm import PoolingParams, SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from blendhub.layout import KVLayout, Namespace
from blendhub.vllm.plugin import register
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.settings import Settings
from blendhub.vllm.worker.model.model_check import ModelSupport

register()
LAYOUT = KVLayout(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float32")
BASE = Namespace(model="m", layout=LAYOUT)
BLENDS = ModelSupport(LAYOUT, True, ())
EXACT_ONLY = ModelSupport(LAYOUT, False, ("keys cannot be moved",))
PROMPT = list(range(40))
IMAGE = MultiModalFeatureSpec(data=None, modality="image", identifier="i", mm_position=PlaceholderRange(0, 4))


def admission(role: str = "kv_both", gate: ModelSupport = BLENDS, **settings) -> Admission:
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="BlendHubConnector", kv_role=role))
    return Admission(config, Settings(**settings), gate, BASE)


def request(asked: dict | None = None, prompt: list[int] | None = PROMPT, **facts) -> Request:
    extra = {"kv_transfer_params": {"blendhub": asked}} if asked is not None else None
    return Request("r", prompt, SamplingParams(max_tokens=1, extra_args=extra), None, **facts)


def pooling() -> Request:
    return Request("r", PROMPT, None, PoolingParams(task="embed"))


def test_an_ordinary_request_blends_and_is_stored():
    tracked = admission().admit(request())
    assert (tracked.mode, tracked.ratio, tracked.stores, tracked.refusal) == ("blend", 0.15, True, None)
    assert tracked.namespace == BASE and tracked.space == BASE.digest
    assert np.array_equal(tracked.tokens(), np.arange(40, dtype=np.uint32)) and tracked.tokens().dtype == np.uint32


@pytest.mark.parametrize(
    "role, code, stores", [("kv_both", None, True), ("kv_producer", "role", True), ("kv_consumer", None, False)]
)
def test_a_role_says_who_reads_and_who_stores(role, code, stores):
    tracked = admission(role).admit(request())
    assert (tracked.refusal.code if tracked.refusal else None) == code
    assert tracked.stores is stores


@pytest.mark.parametrize("given", ["blend", "exact", "off"])
@pytest.mark.parametrize("asked", [None, "blend", "exact", "off"])
def test_a_request_s_mode_comes_before_the_engine_s(given, asked):
    tracked = admission(mode=given).admit(request({"mode": asked} if asked else None))
    wanted = asked or given
    assert tracked.mode == wanted
    assert (tracked.refusal is not None) == (wanted == "off")
    assert tracked.stores
    if wanted == "off":
        assert tracked.refusal.code == "off"
        assert tracked.refusal.reason == ("mode is off for this request" if asked else "mode is off")


@pytest.mark.parametrize("asked, ratio", [({}, 0.4), ({"recompute_ratio": 0}, 0.0), ({"recompute_ratio": 1.0}, 1.0)])
def test_a_request_s_ratio_comes_before_the_engine_s(asked, ratio):
    assert admission(recompute_ratio=0.4).admit(request(asked)).ratio == ratio


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("asked", [{}, {"store": True}, {"store": False}])
def test_storing_needs_the_engine_s_and_the_request_s_consent(engine, asked):
    assert admission(store=engine).admit(request(asked)).stores is (engine and asked.get("store", True))


@pytest.mark.parametrize("asked", [{"mode": "fast"}, {"recompute_ratio": 2}, {"mood": "off"}, ["blend"], "off"])
def test_a_request_that_is_not_understood_is_served_without_reuse_and_says_why(asked):
    tracked = admission().admit(request(asked))
    assert tracked.refusal.code == "bad_request" and "kv_transfer_params.blendhub" in tracked.refusal.reason
    assert not tracked.stores
    assert tracked.report()["reason"] == tracked.refusal.reason


def test_a_misspelt_name_of_blendhub_is_not_taken_for_silence():
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"blendhb": {"mode": "off"}}})
    tracked = admission().admit(Request("r", PROMPT, params, None))
    assert tracked.refusal.code == "bad_request" and "(did you mean 'blendhub'?)" in tracked.report()["reason"]


def test_what_no_connector_here_reads_is_logged_once(caplog):
    made = admission()
    with caplog.at_level(logging.WARNING, logger="blendhub"):
        for number in range(100):
            given = {"remote_host": "h", f"word-{number}": 1, "blendhub": {"mode": "exact"}}
            params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": given})
            assert made.admit(Request("r", PROMPT, params, None)).refusal is None
    assert sum("has the key 'remote_host'; BlendHub reads only 'blendhub'" in line for line in caplog.messages) == 1
    assert len(caplog.messages) <= 40, "clients can fill the log"


@pytest.mark.parametrize(
    "strange, reason",
    [
        (request(mm_features=[IMAGE]), "prompts with images, sound or video are not supported"),
        (request(prompt=None, prompt_embeds=torch.zeros(40, 8)), "prompts given as embeddings are not supported"),
        (
            request(prompt_embeds=torch.zeros(40, 8), prompt_is_token_ids=[True] * 39 + [False]),
            "prompts given as embeddings are not supported",
        ),
        (pooling(), "pooling requests are not supported"),
    ],
    ids=["image", "embeddings", "embeddings_and_tokens", "pooling"],
)
def test_where_tokens_do_not_tell_the_kv_nothing_is_reused_and_nothing_stored(strange, reason):
    tracked = admission().admit(strange)
    assert (tracked.refusal.code, tracked.refusal.reason) == ("request", reason)
    assert not tracked.stores


def test_a_model_whose_keys_cannot_be_moved_is_served_with_exact_reuse():
    made = admission(gate=EXACT_ONLY)
    assert made.admit(request()).mode == "exact"
    assert made.admit(request({"mode": "blend"})).mode == "exact"
    assert made.admit(request({"mode": "off"})).mode == "off"
    assert not made.holes_for(request())
    assert admission().holes_for(request())


def test_a_cache_salt_has_a_namespace_of_its_own():
    made = admission()
    salted = [made.admit(request(cache_salt=salt)).namespace for salt in (None, "a", "b", "a")]
    assert [one.cache_salt for one in salted] == ["", "a", "b", "a"]
    assert len({one.digest for one in salted}) == 3
    assert salted[1] == salted[3]


def test_a_lora_adapter_has_a_namespace_of_its_own_and_exact_reuse(tmp_path):
    made = admission()
    (tmp_path / "adapter.bin").write_bytes(b"first")
    ours = request(lora_request=LoRARequest("ours", 1, str(tmp_path)))
    theirs = request(lora_request=LoRARequest("theirs", 2, str(tmp_path)))
    elsewhere = request(lora_request=LoRARequest("ours", 3, str(tmp_path / "elsewhere")))
    first = made.admit(ours)
    assert first.mode == "exact" and not made.holes_for(ours)
    assert first.refusal is None and first.stores
    assert first.space == made.admit(ours).space
    assert len({first.space, made.admit(theirs).space, made.admit(elsewhere).space, BASE.digest}) == 4
    # Another adapter may be put in the same place.
    os.utime(tmp_path / "adapter.bin", ns=(1, 1))
    assert made.admit(ours).space != first.space


def test_a_lora_adapter_that_is_not_a_directory_here_is_told_by_its_name():
    made = admission()
    spaces = [made.admit(request(lora_request=LoRARequest(name, 1, "org/adapter"))).space for name in ("a", "b", "a")]
    assert len(set(spaces)) == 2
