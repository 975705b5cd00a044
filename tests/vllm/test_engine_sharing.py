"""Several engines and one hub; text that may be shared, and text that may not."""

import re

import pytest

from harness.engines import Engine, largest_difference
from harness.engines.adapters import make_adapter
from harness.engines.tiny_model import make_tiny_model
from harness.namespaces import skip_unless_permitted
from tests.hub.processes import HubProcess
from tests.vllm.conftest import SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITH_MEMORY_OF_ITS_OWN = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"']


@pytest.fixture
def settings(tmp_path):
    hub = HubProcess(tmp_path, arena_gib=0.25)
    yield SETTINGS | {"endpoint": hub.endpoint, "hub": {}}
    hub.kill()


def reused(answer):
    return sum(answer.report[f"{how}_tokens"] for how in ("exact", "settled", "moved"))


@pytest.mark.versions
def test_what_one_engine_stored_another_reuses(model, plain, settings, texts, tmp_path):
    document = texts.new(400)
    prompt = [*texts.new(30), *document, *texts.new(9)]
    with Engine(model, settings) as first, Engine(model, settings) as second:
        first.one(document)
        answer = second.one(prompt, recompute_ratio=1.0)
        assert reused(answer) == 400
        n = len(prompt) - 1
        assert largest_difference(answer.kv(n), plain.one(prompt).kv(n)) < 1e-5
        assert reused(second.one([*texts.new(40), *document], cache_salt="mine")) == 0
        assert reused(second.one([*texts.new(50), *document], cache_salt="mine")) == 399, "the salt's own text"
    # The same shape, other weights.
    with Engine(make_tiny_model(tmp_path / model.name, seed=1), settings) as stranger:
        assert reused(stranger.one([*texts.new(60), *document])) == 0


def test_a_salt_that_no_message_can_hold_costs_its_own_request_the_reuse(model, texts):
    document = texts.new(400)
    with Engine(model, SETTINGS) as engine:
        engine.one(document)
        for salt in ("s" * 1025, "\ud800"):
            refused = [engine.one([*texts.new(30), *document], cache_salt=salt) for _ in range(2)]
            assert [reused(answer) for answer in refused] == [0, 0]
            assert all(answer.report["reason"].startswith("cache_salt has ") for answer in refused)
        assert engine.call("counts")["refused_bad_request"] == 4
        assert reused(engine.one([*texts.new(50), *document])) == 399
        assert "UnicodeEncodeError" not in engine.log


@pytest.mark.versions
def test_adapters_share_nothing(model, settings, texts, tmp_path):
    document = texts.new(300)
    adapters = [make_adapter(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]
    with Engine(model, settings, enable_lora=True, max_lora_rank=8, max_loras=2) as engine:
        engine.one(document)
        engine.forget()
        assert reused(engine.one([*document, *texts.new(9)], lora=str(adapters[0]))) == 0
        engine.forget()
        assert reused(engine.one([*document, *texts.new(9)], lora=str(adapters[1]))) == 0
        engine.forget()
        again = engine.one([*document, *texts.new(9)], lora=str(adapters[0]))
        assert again.report["exact_tokens"] >= 300
        engine.forget()
        moved = engine.one([*texts.new(40), *document, *texts.new(9)], lora=str(adapters[0]))
        assert reused(moved) == 0, "requests with an adapter are not blended"


def test_an_engine_that_cannot_map_the_hub_s_memory_is_refused_with_what_mends_it(model, tmp_path):
    """The engine and the hub are as in containers without a common /dev/shm."""
    skip_unless_permitted(WITH_MEMORY_OF_ITS_OWN)
    hub = HubProcess(tmp_path, arena_gib=0.25, within=WITH_MEMORY_OF_ITS_OWN)
    try:
        with pytest.raises(Exception, match=r"cannot map the hub's arena .* docker run --ipc=host"):
            Engine(model, SETTINGS | {"endpoint": hub.endpoint, "hub": {}}).__enter__()
    finally:
        hub.kill()


def test_the_start_says_how_much_room_there_is(model):
    with Engine(model, SETTINGS) as engine:
        assert re.search(
            r"reused anywhere; embedded hub in a thread; arena 256 MiB( \(.* reserved so far\))?: about [\d,]+ tokens",
            engine.log,
        )
    small = SETTINGS | {"hub": {"arena_gib": 0.001, "embedded": "process"}}
    with Engine(model, small) as engine:
        assert "embedded hub in a process; arena 1 MiB" in engine.log
        assert "less than one prompt of max_model_len 2,048" in engine.log
