"""BlendHub beside another connector of vLLM, in its ``MultiConnector``."""

from typing import Any

import pytest

from harness.engines import Engine, disagreement
from tests.vllm.conftest import SETTINGS, TOLERANCE

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


def beside(*connectors, **changes) -> dict[str, Any]:
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [{"kv_role": "kv_both"} | one for one in connectors]},
    }
    return {"kv_transfer_config": config | changes}


def two_connectors(folder, **changes):
    """BlendHub, and vLLM's own example, which keeps each prompt's KV in files."""
    example = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    return beside(OURS, example, **changes)


def test_both_store_and_both_load(model, plain, texts, tmp_path):
    first, second = texts.new(330), texts.new(300)
    goes_on = [*first, *texts.new(9)]
    with Engine(model, **two_connectors(tmp_path)) as engine:
        engine.one(first)
        stored = list(tmp_path.iterdir())
        assert stored, "the other connector has stored the prompt"
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
    with Engine(model, **two_connectors(tmp_path)) as engine:
        answer = engine.one(first, tokens=4)
        assert "External Cache Hit" in engine.log
        assert answer.report["exact_tokens"] == 0
        assert disagreement([answer], [plain.one(first, tokens=4)]) < TOLERANCE
        engine.forget()
        # What it has loaded, BlendHub has stored.
        assert engine.one([*first, *texts.new(9)]).report["exact_tokens"] >= 320


def test_loads_that_would_end_a_request_are_refused(model, texts, tmp_path):
    with Engine(model, **two_connectors(tmp_path, kv_load_failure_policy="fail")) as engine:
        answer = engine.one(texts.new(40))
    assert '"kv_load_failure_policy": "recompute"' in answer.report["reason"]


@pytest.mark.parametrize("other", [OFFLOADING, SIMPLE], ids=["offloading", "simple"])
def test_what_is_blended_is_never_offloaded_under_the_hash_of_its_text(model, plain, texts, other):
    first, lead, question = texts.new(330), texts.new(130), texts.new(60)
    blended = [*lead, *first, *question]
    arrange = ["tests.vllm.offloading_on_cpus:without_cuda"]
    with Engine(model, arrange=arrange, **beside(OURS, other)) as engine:
        # SimpleCPUOffloadConnector offloads what earlier steps have computed.
        engine.one(first, tokens=4)
        engine.one(lead, tokens=4)
        engine.forget()
        answer = engine.one(blended, tokens=40)
        assert answer.report["moved_tokens"] >= 256 and answer.report["approximate_from"] <= 130
        if other is OFFLOADING:
            stored = "tests.vllm.offloading_on_cpus:stored_blocks"
            assert all(engine.call("inside", stored, first)), "what was computed is offloaded under its hashes"
            own = engine.call("inside", stored, [*blended, *answer.tokens])
            assert own[:4] == [True] * 4 and not any(own[4:])
        engine.forget()
        alone = {"mode": "off", "store": False}
        found = engine.one(first, tokens=4, **alone)
        assert found.cached >= 320, "the other connector has it"
        assert disagreement([found], [plain.one(first, tokens=4)]) < TOLERANCE
        engine.forget()
        computed = engine.one(blended, tokens=4, **alone)
        assert computed.cached <= 128, "the other connector has no more than what was computed exactly"
        assert disagreement([computed], [plain.one(blended, tokens=4)]) < TOLERANCE


def test_text_is_not_moved_behind_a_connector_that_keeps_hashes(model, texts):
    first = texts.new(330)
    with Engine(model, **beside(OFFLOADING, OURS)) as engine:
        engine.one(first)
        engine.forget()
        assert engine.one([*texts.new(90), *first, *texts.new(60)]).report["moved_tokens"] == 0
        assert "name BlendHubConnector before it in connectors" in engine.log


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
