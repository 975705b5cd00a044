"""BlendHub beside another connector in vLLM's ``MultiConnector``; models with one block table and with several."""

from typing import Any

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import GPT_OSS
from harness.engines.tiny_model import SHAPE
from tests.vllm.arrangements import arrange, draw_wide_weights
from tests.vllm.conftest import SETTINGS, TOLERANCE, capacity, drawn, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ON_CPUS = "tests.vllm.offloading_on_cpus"
OURS = {"kv_connector": "BlendHubConnector", "kv_connector_extra_config": {"blendhub": SETTINGS}}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"spec_name": "HostSpec", "spec_module_path": ON_CPUS, "cpu_bytes_to_use": 2**28},
}
ALONE = {"mode": "off", "store": False}
"""Options of a request for which BlendHub reuses and stores nothing."""


def beside(*connectors) -> dict[str, Any]:
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [{"kv_role": "kv_both"} | connector for connector in connectors]},
    }
    return {"kv_transfer_config": config}


# vLLM keeps its hybrid allocator on if all connectors support it.
@pytest.fixture(
    scope="module",
    params=[pytest.param(SHAPE, id="one table", marks=pytest.mark.long), pytest.param(GPT_OSS, id="windows")],
)
def arranged(request, tmp_path_factory):
    """What starts engines of a model, and vLLM without connectors."""
    path = drawn(tmp_path_factory.mktemp("model"), request.param)
    common: dict[str, Any] = {"load_format": "dummy", "seed": 7, "disable_hybrid_kv_cache_manager": False}

    def start(**options):
        return Engine(path, arrange=arrange(draw_wide_weights), **common, **options)

    with start() as plain:
        yield start, plain


def test_text_is_moved_before_a_connector_that_offloads_and_none_of_it_is_offloaded_as_exact(arranged, texts):
    start, plain = arranged
    document, lead, question = texts.new(700), texts.new(130), texts.new(60)
    blended, goes_on = [*lead, *document, *question], [*document, *texts.new(90)]
    expected_blended, expected_on = (plain.one(prompt, tokens=40) for prompt in (blended, goes_on))
    with start(**beside(OURS, OFFLOADING)) as engine:
        assert capacity(engine) == capacity(plain) and "text is reused anywhere" in engine.log
        store(engine, document)
        store(engine, lead)
        exact = engine.one(goes_on, tokens=40, store=False)
        assert exact.report["exact_tokens"] == 700
        engine.forget()
        whole = engine.one(blended, tokens=40, recompute_ratio=1.0, store=False)
        assert whole.report["moved_tokens"] >= 600
        assert disagreement([exact, whole], [expected_on, expected_blended]) < TOLERANCE
        engine.forget()
        partly = engine.one(blended, tokens=40)
        assert partly.report["moved_tokens"] >= 600 and partly.report["approximate_from"] <= 130
        stored = f"{ON_CPUS}:stored_blocks"
        assert all(engine.call("inside", stored, document)), "what was computed is offloaded under its hashes"
        own = engine.call("inside", stored, [*blended, *partly.tokens])
        assert own[:4] == [True] * 4 and not any(own[4:])
        engine.forget()
        # BlendHub is asked to do nothing: what is found is the other connector's.
        offloaded = engine.one(goes_on, tokens=40, **ALONE)
        assert offloaded.cached >= 640
        engine.forget()
        computed = engine.one(blended, tokens=40, **ALONE)
        assert computed.cached <= 128, "the other connector has no more than what was computed exactly"
        assert disagreement([offloaded, computed], [expected_on, expected_blended]) < TOLERANCE
        assert not any("failed" in name for name in engine.call("counts"))


def test_behind_such_a_connector_exact_text_alone_is_reused_and_what_it_loads_is_not_stored_with_gaps(arranged, texts):
    """Of a model with windows it loads the last window of a prefix; BlendHub stores what vLLM computes behind that."""
    start, plain = arranged
    document, question, rest = texts.new(700), texts.new(150), texts.new(30)
    goes_on, moved = [*document, *question], [*texts.new(90), *document]
    expected = [plain.one(prompt, tokens=40) for prompt in (goes_on, moved, [*goes_on, *rest])]
    with start(**beside(OFFLOADING, OURS)) as engine:
        assert "name BlendHubConnector before it in connectors" in engine.log
        engine.one(document, tokens=4, store=False)
        engine.forget()
        brought = engine.one(goes_on, tokens=40)
        assert brought.cached >= 640 and brought.report["exact_tokens"] == 0
        engine.forget()
        unmoved = engine.one(moved, tokens=40)
        assert unmoved.report["moved_tokens"] == 0
        engine.forget()
        engine.one(document, **ALONE)  # for vLLM's own cache
        # The other connector has this text, too, and is asked first, if it is allowed to load it.
        engine.call("inside", f"{ON_CPUS}:find_nothing")
        behind = engine.one([*goes_on, *rest], tokens=40)
        assert behind.report["engine_tokens"] >= 640 and behind.report["exact_tokens"] >= 120
        assert disagreement([brought, unmoved, behind], expected) < TOLERANCE
        assert not any("failed" in name for name in engine.call("counts"))


def test_beside_a_connector_that_would_store_blended_kv_as_exact_both_store_and_load_and_nothing_is_moved(
    model, plain, texts, tmp_path
):
    """vLLM's own example, which keeps each prompt's KV in files."""
    first = texts.new(330)
    goes_on, moved = [*first, *texts.new(9)], [*texts.new(300), *first, *texts.new(9)]
    files = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    with Engine(model, **beside(OURS, files)) as engine:
        assert "text is not moved beside ExampleConnector" in engine.log
        store(engine, first)
        assert list(tmp_path.iterdir()), "the other connector has stored the prompt"
        exact = engine.one(goes_on, tokens=4)
        assert exact.report["exact_tokens"] == 330
        engine.forget()
        unmoved = engine.one(moved, tokens=4)
        assert unmoved.report["moved_tokens"] == 0
        assert disagreement([exact, unmoved], [plain.one(prompt, tokens=4) for prompt in (goes_on, moved)]) < TOLERANCE
    # Another engine, whose hub is empty: only the other connector has the prompt.
    with Engine(model, **beside(OURS, files)) as engine:
        loaded = engine.one(first, tokens=4)
        assert "External Cache Hit" in engine.log and loaded.report["exact_tokens"] == 0
        assert disagreement([loaded], [plain.one(first, tokens=4)]) < TOLERANCE
        engine.forget()
        assert engine.one([*first, *texts.new(9)]).report["exact_tokens"] >= 320, "what the other one loads is stored"


def test_one_engine_blends_and_another_answers_and_takes_nothing_of_it_for_exact(model, plain, texts, tmp_path):
    """See ``played_nixl``: NIXL itself needs a GPU."""
    first, question = texts.new(330), texts.new(60)
    prompts = {"blended": [*texts.new(130), *first, *question], "computed": [*texts.new(200), *question]}
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "tests.vllm.played_nixl",
        "kv_connector_extra_config": {"folder": str(tmp_path)},
    }
    with Engine(model, **beside(OURS, nixl)) as prefill:
        assert "played NIXL has heard 1 handshakes" in prefill.log
        store(prefill, first)
        begun = {name: prefill.one(prompt, transfer={"do_remote_decode": True}) for name, prompt in prompts.items()}
        assert begun["blended"].report["moved_tokens"] >= 256
        # Tokens at the begin of moved text that are recomputed are exact.
        exact = begun["blended"].report["approximate_from"]
        assert 130 <= exact < 200 and "approximate_from" not in begun["computed"].report
    with Engine(model, **beside(OURS, nixl)) as decode:
        for name, prompt in prompts.items():
            answer = decode.one(prompt, tokens=4, transfer=begun[name].transfer)
            assert "another connector loads it" in answer.report["reason"]
            assert answer.tokens[0] == begun[name].tokens[0]
        # Neither vLLM's cache nor the hub takes what was blended for exact.
        asked: dict[str, Any] = {"mode": "exact", "store": False}
        goes_on = [*prompts["blended"], 7]
        again = decode.one(goes_on, tokens=4, **asked)
        assert again.cached <= exact
        assert disagreement([again], [plain.one(goes_on, tokens=4)]) < TOLERANCE
        decode.forget()
        assert decode.one([*prompts["blended"], 8], **asked).report["exact_tokens"] <= exact
        # What was computed is exact here, too.
        assert decode.one([*prompts["computed"], 7], **asked).report["exact_tokens"] >= 250
        decode.forget()
        # A proxy has left the report out: what the KV is cannot be known.
        unknown = {name: value for name, value in begun["computed"].transfer.items() if name != "blendhub"}
        other = decode.one(prompts["computed"], cache_salt="other", transfer=unknown)
        assert other.report["reason"] and decode.one(prompts["computed"], cache_salt="other").cached == 0
