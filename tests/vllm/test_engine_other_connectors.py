"""BlendHub beside another connector of vLLM, in its ``MultiConnector``."""

import pytest

from harness.engines import Engine, disagreement
from tests.vllm.conftest import SETTINGS, TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def two_connectors(folder, **changes):
    """BlendHub, and vLLM's own example, which keeps each prompt's KV in files."""
    ours = {"kv_connector": "BlendHubConnector", "kv_connector_extra_config": {"blendhub": SETTINGS}}
    example = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    both = [one | {"kv_role": "kv_both"} for one in (ours, example)]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": both},
    }
    return {"kv_transfer_config": config | changes}


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
        assert "another connector" in engine.log
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
