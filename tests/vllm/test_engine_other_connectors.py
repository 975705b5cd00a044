"""BlendHub beside another connector of vLLM, in its ``MultiConnector``; models with one block table and with several.

vLLM keeps its hybrid allocator on there if all connectors support it.
"""

import json
from typing import Any

import pytest

from harness.engines import Engine, disagreement
from harness.engines.shapes import GEMMA3, GPT_OSS
from harness.engines.tiny_model import SHAPE
from tests.vllm.conftest import SETTINGS, TOLERANCE, capacity

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OURS = {"kv_connector": "BlendHubConnector", "kv_connector_extra_config": {"blendhub": SETTINGS}}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "tests.vllm.offloading_on_cpus",
        "cpu_bytes_to_use": 2**28,
    },
}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 2**28}}
OFFLOADED = "tests.vllm.offloading_on_cpus"
ALONE = {"mode": "off", "store": False}
"""Options of a request for which BlendHub reuses and stores nothing."""


def beside(*connectors, **changes) -> dict[str, Any]:
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [{"kv_role": "kv_both"} | one for one in connectors]},
    }
    return {"kv_transfer_config": config | changes}


def example(folder):
    """vLLM's own example, which keeps each prompt's KV in files."""
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    def started(shape, **options):
        path = tmp_path_factory.mktemp(shape["model_type"])
        (path / "config.json").write_text(json.dumps(shape))
        common = {"load_format": "dummy", "seed": 7, "disable_hybrid_kv_cache_manager": False}
        return Engine(path, arrange=[f"{OFFLOADED}:without_cuda_and_wide"], **{**common, **options})

    return started


@pytest.fixture(scope="module", params=[SHAPE, GEMMA3, GPT_OSS], ids=["one table", "gemma3", "gpt_oss"])
def shape(request):
    return request.param


@pytest.fixture(scope="module")
def same_model(start, shape):
    """vLLM without connectors."""
    with start(shape) as engine:
        yield engine


def failures(engine):
    return [name for name in engine.call("counts") if "failed" in name]


@pytest.fixture(params=[OFFLOADING, SIMPLE], ids=["offloading", "simple"])
def other(request, shape):
    if shape is (GEMMA3 if request.param is SIMPLE else GPT_OSS):
        pytest.skip("models with several block tables: one for each of the two")
    return request.param


def test_text_is_moved_before_a_connector_that_offloads_and_none_of_it_is_offloaded_as_exact(
    shape, same_model, other, start, texts
):
    document, lead, question = texts.new(700), texts.new(130), texts.new(60)
    blended, goes_on = [*lead, *document, *question], [*document, *texts.new(90)]
    expected = {name: same_model.one(asked, tokens=40) for name, asked in [("blended", blended), ("on", goes_on)]}
    with start(shape, **beside(OURS, other)) as engine:
        assert capacity(engine) == capacity(same_model) and "text is reused anywhere" in engine.log
        for text in (document, lead):
            engine.one(text, tokens=4)
            engine.forget()
        exact = engine.one(goes_on, tokens=40, store=False)
        assert exact.report["exact_tokens"] == 700
        assert disagreement([exact], [expected["on"]]) < TOLERANCE
        engine.forget()
        whole = engine.one(blended, tokens=40, recompute_ratio=1.0, store=False)
        assert whole.report["moved_tokens"] >= 600
        assert disagreement([whole], [expected["blended"]]) < TOLERANCE
        engine.forget()
        partly = engine.one(blended, tokens=40)
        assert partly.report["moved_tokens"] >= 600 and partly.report["approximate_from"] <= 130
        if other is OFFLOADING and shape is SHAPE:
            stored = f"{OFFLOADED}:stored_blocks"
            assert all(engine.call("inside", stored, document)), "what was computed is offloaded under its hashes"
            own = engine.call("inside", stored, [*blended, *partly.tokens])
            assert own[:4] == [True] * 4 and not any(own[4:])
        engine.forget()
        # BlendHub is asked to do nothing: what is found is the other connector's.
        offloaded = engine.one(goes_on, tokens=40, **ALONE)
        assert offloaded.cached >= 640 and disagreement([offloaded], [expected["on"]]) < TOLERANCE
        engine.forget()
        computed = engine.one(blended, tokens=40, **ALONE)
        assert computed.cached <= 128, "the other connector has no more than what was computed exactly"
        assert disagreement([computed], [expected["blended"]]) < TOLERANCE
        assert not failures(engine)


def test_behind_such_a_connector_exact_text_alone_is_reused_and_what_it_loads_is_not_stored_with_gaps(
    shape, same_model, other, start, texts
):
    """Of a model with windows it loads the last window of a prefix; BlendHub stores what vLLM computes behind that."""
    document, question, rest = texts.new(700), texts.new(150), texts.new(30)
    goes_on, moved = [*document, *question], [*texts.new(90), *document]
    expected = [same_model.one(asked, tokens=40) for asked in (goes_on, moved, [*goes_on, *rest])]
    with start(shape, **beside(other, OURS)) as engine:
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
        engine.call("inside", f"{OFFLOADED}:find_nothing")
        behind = engine.one([*goes_on, *rest], tokens=40)
        assert behind.report["engine_tokens"] >= 640 and behind.report["exact_tokens"] >= 120
        assert disagreement([brought, unmoved, behind], expected) < TOLERANCE
        assert not failures(engine)


def test_a_connector_that_does_not_support_the_allocator_ends_the_start_or_turns_it_off(start, tmp_path, texts):
    """vLLM decides that: with its own example, which supports one block table only."""
    connectors = beside(OURS, example(tmp_path / "kv"))
    with pytest.raises(RuntimeError, match="support"):
        start(GEMMA3, **connectors)
    document = texts.new(300)
    with start(GEMMA3, disable_hybrid_kv_cache_manager=None, **connectors) as engine:
        assert "Turning off hybrid kv cache manager" in engine.log
        engine.one(document)
        engine.forget()
        assert engine.one([*document, *texts.new(9)]).report["exact_tokens"] == 300


def test_both_store_and_both_load(model, plain, texts, tmp_path):
    first, second = texts.new(330), texts.new(300)
    goes_on = [*first, *texts.new(9)]
    both = beside(OURS, example(tmp_path))
    with Engine(model, **both) as engine:
        engine.one(first)
        assert list(tmp_path.iterdir()), "the other connector has stored the prompt"
        engine.forget()
        exact = engine.one(goes_on, tokens=4)
        assert exact.report["exact_tokens"] == 330
        assert disagreement([exact], [plain.one(goes_on, tokens=4)]) < TOLERANCE
        # Nothing of it is blended: the other connector would store that as exact.
        assert "text is not moved beside ExampleConnector" in engine.log
        engine.forget()
        moved = [*second, *first, *texts.new(9)]
        answer = engine.one(moved, tokens=4)
        assert answer.report["moved_tokens"] == 0
        assert disagreement([answer], [plain.one(moved, tokens=4)]) < TOLERANCE
    # Another engine, whose hub is empty: only the other connector has the prompt.
    with Engine(model, **both) as engine:
        answer = engine.one(first, tokens=4)
        assert "External Cache Hit" in engine.log
        assert answer.report["exact_tokens"] == 0
        assert disagreement([answer], [plain.one(first, tokens=4)]) < TOLERANCE
        engine.forget()
        # What it has loaded, BlendHub has stored.
        assert engine.one([*first, *texts.new(9)]).report["exact_tokens"] >= 320


def test_loads_that_would_end_a_request_are_refused(model, texts, tmp_path):
    with Engine(model, **beside(OURS, example(tmp_path), kv_load_failure_policy="fail")) as engine:
        answer = engine.one(texts.new(40))
    assert '"kv_load_failure_policy": "recompute"' in answer.report["reason"]


def played_nixl(folder):
    """See ``played_nixl``: NIXL itself needs a GPU."""
    return {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "tests.vllm.played_nixl",
        "kv_connector_extra_config": {"folder": str(folder)},
    }


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "behind"])
def test_one_engine_blends_and_another_answers_and_takes_nothing_of_it_for_exact(
    model, plain, texts, tmp_path, is_first
):
    first, question = texts.new(330), texts.new(60)
    blended, computed = [*texts.new(130), *first, *question], [*texts.new(200), *question]
    connectors = [OURS, played_nixl(tmp_path)]
    both = beside(*(connectors if is_first else connectors[::-1]))
    given = {}
    with Engine(model, **both) as prefill:
        assert "played NIXL has heard 1 handshakes" in prefill.log
        prefill.one(first)
        prefill.forget()
        for name, prompt in [("blended", blended), ("computed", computed)]:
            given[name] = prefill.one(prompt, transfer={"do_remote_decode": True})
        assert given["blended"].report["moved_tokens"] >= 256
        # Tokens at the begin of moved text that are recomputed are exact.
        exact = given["blended"].report["approximate_from"]
        assert 130 <= exact < 200
        assert "approximate_from" not in given["computed"].report
    with Engine(model, **both) as decode:
        for name, prompt in [("blended", blended), ("computed", computed)]:
            answer = decode.one(prompt, tokens=4, transfer=given[name].transfer)
            assert "another connector loads it" in answer.report["reason"]
            assert answer.tokens[0] == given[name].tokens[0]
        # Neither vLLM's cache nor the hub takes what was blended for exact.
        asked: dict[str, Any] = {"mode": "exact", "store": False}
        again = decode.one([*blended, 7], tokens=4, **asked)
        assert again.cached <= exact
        assert disagreement([again], [plain.one([*blended, 7], tokens=4)]) < TOLERANCE
        decode.forget()
        assert decode.one([*blended, 8], **asked).report["exact_tokens"] <= exact
        # What was computed is exact here, too.
        assert decode.one([*computed, 7], **asked).report["exact_tokens"] >= 250
        decode.forget()
        # A proxy has left the report out: what the KV is cannot be known.
        unknown = {name: one for name, one in given["computed"].transfer.items() if name != "blendhub"}
        other = decode.one(computed, cache_salt="other", transfer=unknown)
        assert other.report["reason"] and decode.one(computed, cache_salt="other").cached == 0
