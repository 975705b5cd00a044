"""Several engines and one hub; text that may be shared, and text that may not."""

import re

import pytest

from harness.engines import Engine, disagreement, largest_difference
from harness.engines.tiny_model import make_tiny_model
from harness.namespaces import skip_unless_permitted
from tests.hub.processes import HubProcess
from tests.vllm.conftest import SETTINGS, TOLERANCE, reused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITH_MEMORY_OF_ITS_OWN = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"']


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    hub = HubProcess(tmp_path_factory.mktemp("hub"), arena_gib=0.25)
    yield SETTINGS | {"endpoint": hub.endpoint, "hub": {}}
    hub.kill()


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
        # What one has blended the other one has as it is, and no other salt has it.
        n = len(blended := [*texts.new(20), *document, *texts.new(60)])
        before = first.one(blended).kv(n)
        again = second.one([*blended, *texts.new(9)])
        assert again.report["engine_tokens"] == 0 and again.report["settled_tokens"] == n - 20
        assert (again.kv(n) == before).all()
        assert second.one(blended, cache_salt="mine").report["settled_tokens"] == 0
    # The same shape, other weights.
    with Engine(make_tiny_model(tmp_path / model.name, seed=1), settings) as stranger:
        assert reused(stranger.one([*texts.new(60), *document])) == 0


def test_one_engine_computes_prompts_and_another_one_answers(model, plain, settings, texts):
    prompts = [texts.new(n) for n in (300, 555, 700)]
    with (
        Engine(model, settings, kv_role="kv_producer") as prefill,
        Engine(model, settings, kv_role="kv_consumer") as decode,
    ):
        prefill.ask(*prompts)
        answers = decode.ask(*prompts, tokens=20)
        assert [answer.report["exact_tokens"] for answer in answers] == [299, 554, 699]
        assert disagreement(answers, [plain.one(prompt, tokens=20) for prompt in prompts]) < TOLERANCE
        # Documents of several prompts in one.
        moved = [*texts.new(20), *prompts[2], *prompts[1], *texts.new(9)]
        blended = decode.one(moved, tokens=4, recompute_ratio=1.0)
        assert blended.report["moved_tokens"] == 1255
        assert disagreement([blended], [plain.one(moved, tokens=4)]) < TOLERANCE
        # Each does its part only.
        prefill.forget()
        assert "this engine stores and reads nothing" in prefill.one(prompts[0]).report["reason"]
        decode.one(alone := texts.new(300))
        decode.forget()
        assert decode.one([*alone, *texts.new(9)]).report["exact_tokens"] == 0


def test_a_salt_that_no_message_can_hold_costs_its_own_request_the_reuse(model, texts):
    document = texts.new(400)
    with Engine(model, SETTINGS) as engine:
        assert re.search(
            r"reused anywhere; embedded hub in a thread; arena 256 MiB( \(.* reserved so far\))?: about [\d,]+ tokens",
            engine.log,
        )
        engine.one(document)
        for salt in ("s" * 1025, "\ud800"):
            refused = [engine.one([*texts.new(30), *document], cache_salt=salt) for _ in range(2)]
            assert [reused(answer) for answer in refused] == [0, 0]
            assert all(answer.report["reason"].startswith("cache_salt has ") for answer in refused)
        assert engine.call("counts")["refused_bad_request"] == 4
        assert reused(engine.one([*texts.new(50), *document])) == 399
        assert "UnicodeEncodeError" not in engine.log


def test_an_engine_that_cannot_map_the_hub_s_memory_is_refused_with_what_mends_it(model, tmp_path):
    """The engine and the hub are as in containers without a common /dev/shm."""
    skip_unless_permitted(WITH_MEMORY_OF_ITS_OWN)
    hub = HubProcess(tmp_path, arena_gib=0.25, within=WITH_MEMORY_OF_ITS_OWN)
    try:
        with pytest.raises(Exception, match=r"cannot map the hub's arena .* docker run --ipc=host"):
            Engine(model, SETTINGS | {"endpoint": hub.endpoint, "hub": {}}).__enter__()
    finally:
        hub.kill()
