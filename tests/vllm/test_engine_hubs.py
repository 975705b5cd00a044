"""Engines and their hubs: shared, out of reach, far too small, and with a damaged store."""

import itertools

import pytest

from harness.engines import Engine, disagreement, largest_difference
from harness.engines.engine import transfer_config
from harness.engines.tiny_model import make_tiny_model
from tests.hub.processes import IN_A_PLACE, HubProcess
from tests.namespaces import skip_unless_permitted
from tests.vllm.conftest import ROUNDING, SETTINGS, TOLERANCE, reused, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
        assert largest_difference(answer.kv(n), plain.one(prompt).kv(n)) < ROUNDING
        assert reused(second.one([*texts.new(40), *document], cache_salt="mine")) == 0
        assert reused(second.one([*texts.new(50), *document], cache_salt="mine")) == 399, "the salt's own text"
        # What one has blended the other one has as it is, and no other salt has it.
        n = len(blended := [*texts.new(20), *document, *texts.new(60)])
        before = first.one(blended).kv(n)
        again = second.one([*blended, *texts.new(9)])
        assert again.report["engine_tokens"] == 0 and again.report["settled_tokens"] == n - 20
        assert (again.kv(n) == before).all()
        assert second.one(blended, cache_salt="mine").report["settled_tokens"] == 0
        # A salt that no message can hold costs its own request the reuse.
        for salt in ("s" * 1025, "\ud800"):
            refused = second.one([*texts.new(30), *document], cache_salt=salt)
            assert reused(refused) == 0 and refused.report["reason"].startswith("cache_salt has ")
        assert second.call("counts")["refused_bad_request"] == 2
        assert reused(second.one([*texts.new(50), *document])) == 399
    # The same shape, other weights.
    with Engine(make_tiny_model(tmp_path / model.name, seed=1), settings) as stranger:
        assert reused(stranger.one([*texts.new(60), *document])) == 0


def test_one_engine_computes_prompts_and_another_one_answers(model, plain, settings, texts):
    prompts = [texts.new(n) for n in (300, 555, 700)]
    with (
        Engine(model, kv_transfer_config=transfer_config(settings, "kv_producer")) as prefill,
        Engine(model, kv_transfer_config=transfer_config(settings, "kv_consumer")) as decode,
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
        store(decode, alone := texts.new(300))
        assert decode.one([*alone, *texts.new(9)]).report["exact_tokens"] == 0


def test_an_engine_that_cannot_map_the_hub_s_memory_is_refused_with_what_mends_it(model, tmp_path):
    """The engine and the hub are as in containers without a common /dev/shm."""
    skip_unless_permitted(["unshare", "--mount"])
    hub = HubProcess(tmp_path, arena_gib=0.25, within=[*IN_A_PLACE, "size=1g"])
    try:
        with pytest.raises(Exception, match=r"cannot map the hub's arena .* docker run --ipc=host"):
            Engine(model, SETTINGS | {"endpoint": hub.endpoint, "hub": {}}).__enter__()
    finally:
        hub.kill()


def test_an_arena_that_is_far_too_small(model, plain, texts):
    documents = [texts.new(300) for _ in range(8)]
    with Engine(model, SETTINGS | {"hub": {"arena_gib": 0.003, "metrics": "", "embedded": "process"}}) as engine:
        assert "embedded hub in a process; arena 3" in engine.log
        assert "less than one prompt of max_model_len 2,048" in engine.log
        store(engine, *documents)
        prompts = [[*texts.new(20), *one, *texts.new(20), *other] for one, other in itertools.pairwise(documents)]
        answers = engine.ask(*prompts, tokens=4, recompute_ratio=1.0)
    assert disagreement(answers, plain.ask(*prompts, tokens=4)) < TOLERANCE


def test_files_of_the_store_are_damaged(model, plain, texts, tmp_path):
    documents = [texts.new(300) for _ in range(6)]
    # What is exact is not recomputed, so that wrong bytes would show.
    prompts = [[*documents[n], *texts.new(20), *documents[n - 1], *texts.new(9)] for n in range(6)]
    disk = {"name": "disk", "options": {"path": str(tmp_path / "store"), "capacity_gib": 0.1}}
    settings = SETTINGS | {"hub": {"arena_gib": 0.05, "metrics": "", "store": disk}, "lookup_timeout_s": 5.0}
    with Engine(model, settings) as engine:
        store(engine, *documents)
    files = sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 100_000)
    assert len(files) >= 6
    for path in files[: len(files) // 2]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    # Another life of the engine: all it can have is on the disk.
    with Engine(model, settings) as engine:
        answers = engine.ask(*prompts, tokens=4, recompute_ratio=1.0)
    assert disagreement(answers, plain.ask(*prompts, tokens=4)) < TOLERANCE
    # Three of the six documents are damaged, and each stands in two prompts.
    assert sum(map(reused, answers)) == 2 * 3 * 300
